//! One piece of fixed work for callgrind, which counts the instructions of [`counted`] and nothing else.
//!
//!     counted            the cases, one a line: name, what it is counted per, how many of those it does
//!     counted CASE       do it
//!
//! `make instructions` runs all of them and compares (`bench/micro/instructions.py`).

use std::hint::black_box;
use std::process::ExitCode;

use kvsync_benches::{BLOCK, Content, Engines, Feed, Held, Question, Random};
use kvsync_index::event::Adapter;
use kvsync_index::key::{BlockKey, KeyChain};
use kvsync_index::wire::Batch;

const WORKERS: usize = 64;
const BLOCKS: usize = 16 * 1_024;

/// What is counted: callgrind is told this function's name.
#[inline(never)]
fn counted(work: &mut dyn FnMut()) {
    work();
    black_box(());
}

/// A piece of work: its name, what its instructions are divided by, and how many of those it does.
struct Case {
    name: &'static str,
    unit: &'static str,
    units: usize,
    run: fn(),
}

const CASES: &[Case] = &[
    Case { name: "apply 16 a batch", unit: "block", units: BLOCKS, run: || apply(Content::Own, 16) },
    Case { name: "apply 1 a batch", unit: "block", units: BLOCKS, run: || apply(Content::Own, 1) },
    Case { name: "apply shared", unit: "block", units: BLOCKS, run: || apply(Content::Shared, 16) },
    Case { name: "apply own hashes", unit: "block", units: BLOCKS, run: || apply(Content::Seeded, 16) },
    Case { name: "apply churn", unit: "block", units: BLOCKS, run: churn },
    Case { name: "decode 16 a batch", unit: "block", units: BLOCKS, run: || decode(16) },
    Case { name: "decode 1 a batch", unit: "block", units: BLOCKS, run: || decode(1) },
    Case { name: "keys of 131072 tokens", unit: "block", units: 8_192, run: keys },
    Case { name: "lookup 131072 x 64 all", unit: "lookup", units: 1, run: || lookup(8_192, 64, Held::All, 1) },
    Case { name: "lookup 131072 x 64 part", unit: "lookup", units: 1, run: || lookup(8_192, 64, Held::Part, 1) },
    Case { name: "lookup 131072 x 64 churned", unit: "lookup", units: 1, run: || lookup(8_192, 64, Held::Churned, 1) },
    Case {
        name: "lookup 131072 x 64 nothing",
        unit: "lookup",
        units: 100,
        run: || lookup(8_192, 64, Held::Nothing, 100),
    },
    Case { name: "lookup 16384 x 8 all", unit: "lookup", units: 100, run: || lookup(1_024, 8, Held::All, 100) },
    Case { name: "lookup 512 x 64 all", unit: "lookup", units: 1_000, run: || lookup(32, 64, Held::All, 1_000) },
    Case { name: "observe 16384", unit: "answer", units: 1_000, run: observe },
    Case { name: "clear", unit: "block", units: BLOCKS, run: || lose(|engines| engines.clear(0)) },
    Case {
        name: "remove worker",
        unit: "block",
        units: BLOCKS,
        run: || lose(|engines| engines.index.remove_worker("worker-0")),
    },
];

fn apply(content: Content, per_batch: usize) {
    let feed = Feed::stores(WORKERS, content, BLOCKS, per_batch);
    let engines = Engines::new(WORKERS);
    counted(&mut || engines.apply(&feed));
    feed.check(&engines);
}

fn churn() {
    let [filling, churning] = Feed::churn(WORKERS, BLOCKS, BLOCKS, 16);
    let engines = Engines::new(WORKERS);
    engines.apply(&filling);
    counted(&mut || engines.apply(&churning));
    churning.check(&engines);
}

fn decode(per_batch: usize) {
    let feed = Feed::stores(1, Content::Own, BLOCKS, per_batch);
    counted(&mut || {
        for (_, payload) in &feed.payloads {
            Batch::decode(payload).expect("a batch").for_each(|event| drop(black_box(event)));
        }
    });
}

fn keys() {
    let prompt = Random::new(1).tokens(8_192 * BLOCK);
    counted(&mut || {
        let root = BlockKey::root("model", &Adapter::None, BLOCK as u32);
        black_box(KeyChain::new(root, &prompt, BLOCK as u32, &[]).key(8_191));
    });
}

fn lookup(blocks: usize, workers: usize, held: Held, times: usize) {
    let question = Question::new(blocks, workers, held);
    counted(&mut || (0..times).for_each(|_| question.ask()));
}

fn observe() {
    let question = Question::new(1_024, 8, Held::All);
    let answer = question.answer();
    counted(&mut || (0..1_000).for_each(|_| question.observe(&answer)));
}

fn lose(how: fn(&Engines)) {
    let engines = Engines::new(1);
    engines.apply(&Feed::stores(1, Content::Own, BLOCKS, 16));
    counted(&mut || how(&engines));
    assert_eq!(engines.blocks(), 0);
}

fn main() -> ExitCode {
    let Some(name) = std::env::args().nth(1) else {
        CASES.iter().for_each(|case| println!("{}\t{}\t{}", case.name, case.unit, case.units));
        return ExitCode::SUCCESS;
    };
    let Some(case) = CASES.iter().find(|case| case.name == name) else {
        eprintln!("no such case: {name}");
        return ExitCode::FAILURE;
    };
    (case.run)();
    ExitCode::SUCCESS
}
