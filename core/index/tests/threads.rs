//! One writer, many readers: a match sees each worker's batch wholly or not at all.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use kvsync_index::event::{Adapter, EngineHash, Event, Removed, Run, Stored, Tier};
use kvsync_index::{Bounds, Facts, Index, Prompt};

const BLOCKS: u64 = 64;
const BATCHES: usize = 2_000;

fn hashes() -> Vec<EngineHash<'static>> {
    (0..BLOCKS).map(EngineHash::Unsigned).collect()
}

fn store() -> Event<'static> {
    Event::Stored(Stored {
        run: Run {
            hashes: hashes(),
            parent: None,
            tokens: (0..BLOCKS as u32).collect(),
            block_size: 1,
            adapter: Adapter::None,
            extra_keys: Some(vec![vec![]; BLOCKS as usize]),
        },
        tier: Some(Tier::Gpu),
        group: 0,
        kind: None,
        window: None,
    })
}

/// Tail first, so that a reader in between would see a prefix that no batch ends with.
fn removal() -> Event<'static> {
    let hashes = hashes().into_iter().rev().collect();
    Event::Removed(Removed { hashes, tier: Some(Tier::Gpu), group: Some(0), remaining: None })
}

#[test]
fn a_match_sees_whole_batches() {
    let index = Index::new();
    index.add_worker("w", "m", Facts::default());
    let tokens: Vec<u32> = (0..=BLOCKS as u32).collect();
    let prompt = Prompt { tokens: &tokens, model: "m", adapter: None, extra: &[], salted: false };
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let readers: Vec<_> = (0..2)
            .map(|_| {
                scope.spawn(|| {
                    let mut looks = 0;
                    while !done.load(Ordering::Relaxed) || looks == 0 {
                        let credit = index.lookup(&prompt)[0].1.credit;
                        assert!(credit == 0 || credit == BLOCKS, "{credit}");
                        looks += 1;
                        thread::yield_now();
                    }
                })
            })
            .collect();
        let worker = index.worker("w").expect("registered");
        for at in 0..BATCHES {
            index.change(&worker, |worker, shared| {
                worker.apply(shared, None, [if at % 2 == 0 { store() } else { removal() }])
            });
        }
        done.store(true, Ordering::Relaxed);
        for reader in readers {
            reader.join().expect("no reader saw part of a batch");
        }
    });
}

#[test]
fn workers_come_and_go_while_others_match() {
    let index = Index::new();
    let tokens: Vec<u32> = (0..=BLOCKS as u32).collect();
    let prompt = Prompt { tokens: &tokens, model: "m", adapter: None, extra: &[], salted: false };
    index.add_worker("stays", "m", Facts::default());
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..500 {
                index.add_worker("goes", "m", Facts::default());
                let worker = index.worker("goes").expect("registered");
                assert!(index.change(&worker, |worker, shared| worker.apply(shared, None, [store()])));
                index.remove_worker("goes");
                assert!(!index.change(&worker, |_, _| unreachable!("it is registered no longer")));
            }
            done.store(true, Ordering::Relaxed);
        });
        while !done.load(Ordering::Relaxed) {
            let found = index.lookup(&prompt);
            assert_eq!(found[0].0.name(), "stays");
            assert!(found.len() <= 2);
        }
    });
    assert_eq!(index.lookup(&prompt).len(), 1);
    assert!(index.worker("goes").is_none());
}

/// A store of one chain of its own.
fn chain(number: u64) -> Event<'static> {
    let Event::Stored(mut stored) = store() else { unreachable!() };
    stored.run.hashes = (0..BLOCKS).map(|at| EngineHash::Unsigned(number * BLOCKS + at)).collect();
    stored.run.tokens = (0..BLOCKS as u32).map(|at| (number as u32 + 1) * 1000 + at).collect();
    Event::Stored(stored)
}

#[test]
fn the_bound_holds_while_others_match_and_workers_come_and_go() {
    const MOST: u64 = 10 * BLOCKS;
    let index = Index::bounded(Bounds { blocks: Some(MOST), ..Bounds::default() });
    index.add_worker("stays", "m", Facts::default());
    let tokens: Vec<u32> = (1000..1000 + BLOCKS as u32).chain([0]).collect();
    let prompt = Prompt { tokens: &tokens, model: "m", adapter: None, extra: &[], salted: false };
    let done = AtomicBool::new(false);
    let blocks = || index.describe().iter().map(|(_, state)| state.blocks).sum::<u64>();
    thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                assert!(index.lookup(&prompt)[0].1.credit <= BLOCKS);
            }
        });
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                index.remove_worker("goes");
                thread::yield_now();
            }
        });
        for number in 0..500 {
            index.add_worker("goes", "m", Facts::default());
            for name in ["stays", "goes"] {
                index.change_named(name, |worker, shared| worker.apply(shared, None, [chain(number)]));
                assert!(blocks() <= MOST);
            }
        }
        done.store(true, Ordering::Relaxed);
    });
    index.remove_worker("stays");
    index.remove_worker("goes");
    assert_eq!(blocks(), 0);
    // what was removed counts no more: there is room for as much again
    index.add_worker("new", "m", Facts::default());
    (0..10).for_each(|number| index.change_named("new", |worker, shared| worker.apply(shared, None, [chain(number)])));
    assert_eq!(blocks(), MOST);
}

#[test]
fn a_mark_is_not_lost_with_the_registration_that_got_it() {
    let index = Index::new();
    for _ in 0..200 {
        index.add_worker("w", "m", Facts::default());
        thread::scope(|scope| {
            scope.spawn(|| index.change_named("w", |worker, _| worker.mark_reannouncing()));
            index.add_worker("w", "m", Facts::default());
        });
        assert!(index.describe()[0].1.reannouncing);
        index.remove_worker("w");
    }
}
