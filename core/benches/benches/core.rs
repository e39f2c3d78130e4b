//! The index against the clock: `make bench-micro`, or `cargo bench -- lookup` here.
//!
//! Every time is for the whole of what the name says; throughput is in blocks, or in tokens of the prompt. Setting up and
//! freeing an index is not counted, and what each run left behind is checked outside of the count.

use std::hint::black_box;
use std::time::Duration;

use criterion::measurement::WallTime;
use criterion::{BatchSize, BenchmarkGroup, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kvsync_benches::{BLOCK, Content, Engines, Feed, Held, Question, Random};
use kvsync_index::event::Adapter;
use kvsync_index::key::{BlockKey, KeyChain};
use kvsync_index::wire::Batch;

const WORKERS: usize = 64;
const BLOCKS: usize = 64 * 1_024;

fn group<'c>(criterion: &'c mut Criterion, name: &str) -> BenchmarkGroup<'c, WallTime> {
    let mut group = criterion.benchmark_group(name);
    group.sample_size(10).warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(3));
    group
}

/// A feed to an index that `before` has filled.
fn feed(group: &mut BenchmarkGroup<'_, WallTime>, name: &str, before: Option<&Feed>, feed: &Feed) {
    let filled = || {
        let engines = Engines::new(WORKERS);
        before.iter().for_each(|before| engines.apply(before));
        engines
    };
    let engines = filled();
    engines.apply(feed);
    feed.check(&engines);
    drop(engines);
    group.throughput(Throughput::Elements(feed.blocks));
    group.bench_function(name, |bencher| {
        bencher.iter_batched_ref(filled, |engines| engines.apply(feed), BatchSize::PerIteration);
    });
}

fn applying(criterion: &mut Criterion) {
    let mut group = group(criterion, "apply");
    for (name, content, per_batch) in [
        ("own blocks, 16 a batch", Content::Own, 16),
        ("own blocks, 1 a batch", Content::Own, 1),
        ("one content, equal hashes", Content::Shared, 16),
        ("one content, own hashes", Content::Seeded, 16),
    ] {
        feed(&mut group, name, None, &Feed::stores(WORKERS, content, BLOCKS, per_batch));
    }
    let [filling, churning] = Feed::churn(WORKERS, BLOCKS, BLOCKS, 16);
    feed(&mut group, "a removal for each store", Some(&filling), &churning);
    let [filling, churning] = Feed::churn(WORKERS, 16 * BLOCKS, BLOCKS, 16);
    feed(&mut group, "a removal for each store, a million blocks", Some(&filling), &churning);
}

fn decoding(criterion: &mut Criterion) {
    let mut group = group(criterion, "decode");
    for (name, per_batch) in [("16 a batch", 16), ("1 a batch", 1)] {
        let feed = Feed::stores(1, Content::Own, 4_096, per_batch);
        group.throughput(Throughput::Elements(feed.blocks));
        group.bench_function(name, |bencher| {
            bencher.iter(|| {
                for (_, payload) in &feed.payloads {
                    Batch::decode(payload).expect("a batch").for_each(|event| drop(black_box(event)));
                }
            });
        });
    }
}

fn hashing(criterion: &mut Criterion) {
    let mut group = group(criterion, "keys");
    for tokens in [512, 131_072] {
        let prompt = Random::new(1).tokens(tokens);
        group.throughput(Throughput::Elements(tokens as u64));
        group.bench_function(BenchmarkId::from_parameter(tokens), |bencher| {
            bencher.iter(|| {
                let root = BlockKey::root("model", &Adapter::None, BLOCK as u32);
                black_box(KeyChain::new(root, &prompt, BLOCK as u32, &[]).key(tokens / BLOCK - 1))
            });
        });
    }
}

fn lookups(criterion: &mut Criterion) {
    let mut group = group(criterion, "lookup");
    for (blocks, workers, held) in [
        (8_192, 64, Held::All),
        (8_192, 64, Held::Part),
        (8_192, 64, Held::Nothing),
        (8_192, 64, Held::Churned),
        (1_024, 8, Held::All),
        (32, 64, Held::All),
    ] {
        let question = Question::new(blocks, workers, held);
        let name = format!("{} tokens, {workers} workers hold {held:?}", blocks * BLOCK);
        group.throughput(Throughput::Elements((blocks * BLOCK) as u64));
        group.bench_function(name, |bencher| bencher.iter(|| question.ask()));
    }
}

fn observing(criterion: &mut Criterion) {
    let mut group = group(criterion, "observe");
    let question = Question::new(1_024, 8, Held::All);
    let answer = question.answer();
    group.bench_function("16384 tokens, as credited", |bencher| bencher.iter(|| question.observe(&answer)));
}

fn losing(criterion: &mut Criterion) {
    let mut group = group(criterion, "lose 16384 blocks");
    for (content, name) in [(Content::Own, "own"), (Content::Shared, "shared")] {
        let feed = Feed::stores(4, content, 4 * 16_384, 16);
        let filled = || {
            let engines = Engines::new(4);
            engines.apply(&feed);
            engines
        };
        group.bench_function(format!("clear, {name} blocks"), |bencher| {
            bencher.iter_batched_ref(filled, |engines| engines.clear(1), BatchSize::PerIteration);
        });
        group.bench_function(format!("remove_worker, {name} blocks"), |bencher| {
            let remove = |engines: &mut Engines| engines.index.remove_worker("worker-1");
            bencher.iter_batched_ref(filled, remove, BatchSize::PerIteration);
        });
    }
}

criterion_group!(benches, applying, decoding, hashing, lookups, observing, losing);
criterion_main!(benches);
