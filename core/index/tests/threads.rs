//! One writer, many readers: a match sees each worker's batch wholly or not at all.

use std::panic;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Barrier, mpsc};
use std::thread;
use std::time::Duration;

use kvsync_index::event::{Adapter, EngineHash, Event, Removed, Run, Stored, Tier};
use kvsync_index::{Answer, Bounds, Facts, Index, Observation, Prompt};

const BLOCKS: u64 = 64;
const BATCHES: usize = 2_000;

/// To be dropped when others are to end, whether all went well or not.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// What goes wrong here may go on for ever: then that is said.
fn ends(test: impl FnOnce() + Send + 'static) {
    let (goes_on, end) = mpsc::channel::<()>();
    let test = thread::spawn(move || {
        let _goes_on = goes_on;
        test();
    });
    let end = end.recv_timeout(Duration::from_secs(180));
    assert_eq!(end, Err(mpsc::RecvTimeoutError::Disconnected), "it does not end");
    test.join().unwrap_or_else(|panicked| panic::resume_unwind(panicked));
}

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
        let ends = Ends(&done);
        let worker = index.worker("w").expect("registered");
        for at in 0..BATCHES {
            index.change(&worker, |worker, shared| {
                worker.apply(shared, None, [if at % 2 == 0 { store() } else { removal() }])
            });
        }
        drop(ends);
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
            let _ends = Ends(&done);
            for _ in 0..500 {
                index.add_worker("goes", "m", Facts::default());
                let worker = index.worker("goes").expect("registered");
                assert!(index.change(&worker, |worker, shared| worker.apply(shared, None, [store()])));
                index.remove_worker("goes");
                assert!(!index.change(&worker, |_, _| unreachable!("it is registered no longer")));
            }
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
    ends(|| {
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
            let _ends = Ends(&done);
            for number in 0..500 {
                index.add_worker("goes", "m", Facts::default());
                for name in ["stays", "goes"] {
                    index.change_named(name, |worker, shared| worker.apply(shared, None, [chain(number)]));
                    assert!(blocks() <= MOST);
                }
            }
        });
        index.remove_worker("stays");
        index.remove_worker("goes");
        assert_eq!(blocks(), 0);
        // what was removed counts no more: there is room for as much again
        index.add_worker("new", "m", Facts::default());
        (0..10)
            .for_each(|number| index.change_named("new", |worker, shared| worker.apply(shared, None, [chain(number)])));
        assert_eq!(blocks(), MOST);
    });
}

const CHAINS: u64 = 1_200;
/// So many chains after it came, a chain goes again.
const KEPT: u64 = 250;
/// Names of the first worker's own, of the second one's own, and as many of the third one's in a second tier.
const CHURNING: [&str; 3] = ["names", "aliases", "odd"];

fn renamed(event: Event<'static>, worker: usize) -> Event<'static> {
    let rename = |hashes: Vec<EngineHash<'static>>| -> Vec<_> {
        let number =
            |hash: &EngineHash<'_>| if let EngineHash::Unsigned(number) = hash { *number } else { unreachable!() };
        hashes.iter().map(|hash| EngineHash::Unsigned(number(hash) | ((worker == 1) as u64) << 40)).collect()
    };
    match event {
        Event::Stored(stored) => {
            Event::Stored(Stored { run: Run { hashes: rename(stored.run.hashes), ..stored.run }, ..stored })
        }
        Event::Removed(removed) => Event::Removed(Removed { hashes: rename(removed.hashes), ..removed }),
        other => other,
    }
}

fn of_cpu(event: Event<'static>) -> Event<'static> {
    match event {
        Event::Stored(stored) => Event::Stored(Stored { tier: Some(Tier::Cpu), ..stored }),
        Event::Removed(removed) => Event::Removed(Removed { tier: Some(Tier::Cpu), ..removed }),
        other => other,
    }
}

fn gone(number: u64) -> Event<'static> {
    let Event::Stored(stored) = chain(number) else { unreachable!() };
    let hashes = stored.run.hashes;
    Event::Removed(Removed { hashes, tier: Some(Tier::Gpu), group: Some(0), remaining: None })
}

fn tokens_of(number: u64) -> Vec<u32> {
    (0..BLOCKS as u32).map(|at| (number as u32 + 1) * 1000 + at).chain([0]).collect()
}

/// xorshift64*
fn random(state: &mut u64) -> u64 {
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    state.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33
}

fn churn(bounds: Bounds) {
    let index = Index::bounded(bounds);
    CHURNING.iter().for_each(|name| index.add_worker(name, "m", Facts::default()));
    let apply = |number: u64, event: fn(u64) -> Event<'static>| {
        for (at, name) in CHURNING.iter().enumerate() {
            let event = || renamed(event(number), at);
            let events = if at == 2 { vec![event(), of_cpu(event())] } else { vec![event()] };
            index.change_named(name, |worker, shared| worker.apply(shared, None, events.clone()));
        }
    };
    // chains up to the first number have gone, those from the second on have not come
    let (went, comes) = (AtomicU64::new(0), AtomicU64::new(0));
    let done = AtomicBool::new(false);
    let look = |seed: u64| {
        let mut state = seed;
        let mut looks = 0;
        while !done.load(Ordering::Relaxed) || looks == 0 {
            let before = went.load(Ordering::Acquire);
            let number = comes.load(Ordering::Relaxed).saturating_sub(random(&mut state) % (2 * KEPT));
            let tokens = tokens_of(number);
            let prompt = Prompt { tokens: &tokens, model: "m", adapter: None, extra: &[], salted: false };
            for (worker, found) in index.lookup(&prompt) {
                assert!(found.credit == 0 || number >= before, "{} holds chain {number}, of {before}", worker.name());
                let answer = Answer { cached: found.credit, credit: found.credit, as_of: found.as_of, until: 1e9 };
                let _ = index.observe(worker.name(), &prompt, &answer);
            }
            looks += 1;
        }
    };
    thread::scope(|scope| {
        let lookers: Vec<_> = (1..3).map(|seed| scope.spawn(move || look(seed))).collect();
        let ends = Ends(&done);
        for number in 0..CHAINS {
            comes.store(number + 1, Ordering::Relaxed);
            apply(number, chain);
            if let Some(old) = number.checked_sub(KEPT) {
                apply(old, gone);
                went.store(old + 1, Ordering::Release);
            }
        }
        drop(ends);
        lookers.into_iter().for_each(|looker| looker.join().expect("nothing that went is credited"));
    });
    let check = |first_held: u64, left: bool| {
        for (name, state) in index.describe() {
            let count = |word| state.counts.iter().find(|(other, _)| *other == word).map_or(0, |(_, count)| count);
            assert!(count("capped") > 0, "{name} lost nothing");
            let copies = if name == "odd" { 2 } else { 1 };
            let removed = copies * BLOCKS * first_held - count("removed_unknown");
            assert_eq!(
                (state.blocks + count("capped")) * copies + removed,
                copies * BLOCKS * CHAINS,
                "{name}: {state:?}"
            );
            assert_eq!((state.blocks > 0, state.placed), (left, state.blocks), "{name}");
            assert_eq!(state.copies, copies * state.blocks, "{name}");
        }
        for number in 0..CHAINS {
            let tokens = tokens_of(number);
            let prompt = Prompt { tokens: &tokens, model: "m", adapter: None, extra: &[], salted: false };
            for (worker, found) in index.lookup(&prompt) {
                assert!(found.credit == 0 || number >= first_held, "{} holds chain {number}", worker.name());
            }
        }
    };
    check(CHAINS - KEPT, true);
    (CHAINS - KEPT..CHAINS).for_each(|number| apply(number, gone));
    check(CHAINS, false);
    index.expire(0.0);
    assert!(index.bytes() < 2 << 20, "{} bytes for nothing", index.bytes());
}

#[test]
fn what_goes_by_a_bound_on_blocks_goes_wholly_while_others_look() {
    ends(|| churn(Bounds { blocks: Some(2 * KEPT * BLOCKS), bytes: None }));
}

#[test]
fn what_goes_by_a_bound_on_bytes_goes_wholly_while_others_look() {
    ends(|| churn(Bounds { blocks: None, bytes: Some(1 << 20) }));
}

#[test]
fn nobody_waits_for_a_worker_that_is_added_to_a_busy_model() {
    let index = Index::new();
    index.add_worker("busy", "m", Facts::default());
    let busy = index.worker("busy").expect("registered");
    thread::scope(|scope| {
        let index = &index;
        let (asked, answered) = (mpsc::channel(), mpsc::channel());
        assert!(index.change(&busy, |_, _| {
            scope.spawn(move || {
                asked.0.send(()).expect("somebody waits");
                index.add_worker("new", "m", Facts::default());
            });
            asked.1.recv().expect("it begins");
            scope.spawn(move || {
                for _ in 0..500 {
                    assert!(index.worker("new").is_none(), "its model is busy");
                    // of a registry that is only read nobody would see that it waits
                    index.add_worker("elsewhere", "another", Facts::default());
                    thread::yield_now();
                }
                let _ = answered.0.send(());
            });
            answered.1.recv_timeout(Duration::from_secs(10)).expect("the registry is free");
        }));
    });
    assert_eq!(index.workers_of("m").len(), 2);
}

#[test]
fn workers_that_make_a_model_at_the_same_time_share_it() {
    let index = Index::new();
    let prompt = Prompt { tokens: &[1], model: "m", adapter: None, extra: &[], salted: false };
    thread::scope(|scope| {
        for name in ["one", "another", "a third"] {
            let (index, prompt) = (&index, &prompt);
            scope.spawn(move || {
                for _ in 0..10_000 {
                    index.add_worker(name, "m", Facts::default());
                    let found = index.lookup(prompt);
                    assert!(found.iter().any(|(worker, _)| worker.name() == name), "{name} is in another model");
                    index.remove_worker(name);
                }
            });
        }
    });
}

#[test]
fn an_answer_and_a_mark_make_no_room() {
    ends(|| {
        let index = Index::bounded(Bounds { blocks: None, bytes: Some(1) });
        index.add_worker("w", "m", Facts::default());
        index.change_named("w", |worker, shared| worker.forget(shared));
        index.change_named("w", |worker, shared| worker.apply(shared, None, [chain(0)]));
        let tokens = tokens_of(0);
        let prompt = Prompt { tokens: &tokens, model: "m", adapter: None, extra: &[], salted: false };
        for _ in 0..1_000 {
            let found = &index.lookup(&prompt)[0].1;
            let answer = Answer { cached: BLOCKS, credit: found.credit, as_of: found.as_of, until: 1e9 };
            assert_eq!(index.observe("w", &prompt, &answer), Observation::Steady);
            index.change_named("w", |worker, _| worker.mark_reannouncing());
        }
        assert_eq!(index.describe()[0].1.blocks, BLOCKS, "who brought nothing made room, and requests waited for it");
        (0..300).for_each(|_| index.change_named("w", |worker, shared| worker.apply(shared, None, [])));
        assert_eq!(index.describe()[0].1.blocks, 0, "whatever a batch brings, it counts");
    });
}

#[test]
fn a_mark_outlives_registrations_at_the_same_time() {
    const ADD: usize = 4;
    let index = Index::new();
    let begin = Barrier::new(ADD);
    thread::scope(|scope| {
        for adds in 0..ADD {
            let (index, begin) = (&index, &begin);
            scope.spawn(move || {
                for _ in 0..500 {
                    if adds == 0 {
                        index.remove_worker("w");
                        index.add_worker("w", "m", Facts::default());
                        index.change_named("w", |worker, _| worker.mark_reannouncing());
                    }
                    begin.wait();
                    (0..100).for_each(|_| index.add_worker("w", "m", Facts::default()));
                    begin.wait();
                    let marked = index.describe()[0].1.reannouncing;
                    begin.wait();
                    assert!(marked, "the mark is lost");
                }
            });
        }
    });
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

/// A worker with one chain of so many blocks, each of one token.
fn with_a_chain(blocks: u64) -> Index {
    let index = Index::new();
    index.add_worker("w", "m", Facts::default());
    let run = Run {
        hashes: (0..blocks).map(EngineHash::Unsigned).collect(),
        parent: None,
        tokens: (0..blocks as u32).collect(),
        block_size: 1,
        adapter: Adapter::None,
        extra_keys: Some(vec![]),
    };
    let event = Event::Stored(Stored { run, tier: Some(Tier::Gpu), group: 0, kind: None, window: None });
    index.change_named("w", |worker, shared| worker.apply(shared, None, [event.clone()]));
    index
}

fn blocks(index: &Index) -> u64 {
    index.describe()[0].1.blocks
}

#[test]
fn an_image_is_of_one_moment() {
    let index = Index::new();
    for name in ["w", "other"] {
        index.add_worker(name, "m", Facts::default());
    }
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            for event in [store(), removal()].iter().cycle().take(BATCHES) {
                for name in ["w", "other"] {
                    index.change_named(name, |worker, shared| worker.apply(shared, None, [event.clone()]));
                }
            }
            done.store(true, Ordering::Relaxed);
        });
        let mut seen = [0; 2];
        while !done.load(Ordering::Relaxed) || seen == [0; 2] {
            if let Some(image) = index.dump("w") {
                let told = Index::new();
                told.add_worker("w", "m", Facts::default());
                told.restore("w", &image).unwrap();
                assert!([0, BLOCKS].contains(&blocks(&told)), "{}", blocks(&told));
                seen[usize::from(blocks(&told) > 0)] += 1;
            }
        }
    });
}

/// A worker whose blocks are plain under names of its own, and as many that are not plain.
fn in_all_ways(blocks: u64) -> Index {
    let index = with_a_chain(blocks);
    index.add_worker("other", "m", Facts::default());
    let stored = |hashes: std::ops::Range<u64>, tokens: std::ops::Range<u32>| {
        let run = Run {
            hashes: hashes.map(EngineHash::Unsigned).collect(),
            parent: None,
            tokens: tokens.collect(),
            block_size: 1,
            adapter: Adapter::None,
            extra_keys: Some(vec![]),
        };
        Event::Stored(Stored { run, tier: Some(Tier::Gpu), group: 0, kind: None, window: None })
    };
    let (first, tokens) = (1 << 40, blocks as u32);
    let alike = stored(first..first + blocks, 0..tokens);
    let twice = stored(2 * first..2 * first + blocks, 1 << 30..(1 << 30) + tokens);
    let events = [alike, twice.clone(), twice];
    index.change_named("other", |worker, shared| worker.apply(shared, None, events.clone()));
    index
}

#[test]
fn all_that_takes_several_pieces_is_told() {
    const LONG: u64 = 40_000;
    let index = in_all_ways(LONG);
    let image = index.dump("other").unwrap();
    let told = Index::new();
    told.add_worker("other", "m", Facts::default());
    told.restore("other", &image).unwrap();
    let state = |index: &Index| {
        let (_, state) = index.describe().into_iter().find(|(name, _)| name == "other").unwrap();
        (state.blocks, state.copies, state.placed)
    };
    assert_eq!(state(&told), (2 * LONG, 3 * LONG, 2 * LONG));
    assert_eq!(state(&told), state(&index));
    let again = told.dump("other").unwrap();
    assert_eq!(again.len(), image.len());
}

#[test]
fn marks_that_are_there_keep_nobody_from_being_told() {
    let index = with_a_chain(100_000);
    let mark = || index.mark("w", kvsync_index::Worker::is_marked_hidden_keys, kvsync_index::Worker::mark_hidden_keys);
    let done = AtomicBool::new(false);
    mark();
    thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                mark();
            }
        });
        let _ends = Ends(&done);
        assert!((0..20).all(|_| index.dump("w").is_some()));
    });
}

#[test]
fn an_image_is_seen_wholly_or_not_at_all() {
    const LONG: u64 = 50_000;
    let image = with_a_chain(LONG).dump("w").unwrap();
    let tokens: Vec<u32> = (0..=LONG as u32).collect();
    let prompt = Prompt { tokens: &tokens, model: "m", adapter: None, extra: &[], salted: false };
    let index = Index::new();
    index.add_worker("w", "m", Facts::default());
    thread::scope(|scope| {
        let looking = scope.spawn(|| {
            loop {
                let credit = index.lookup(&prompt)[0].1.credit;
                assert!(credit == 0 || credit == LONG, "{credit}");
                if credit > 0 {
                    return;
                }
            }
        });
        index.restore("w", &image).unwrap();
        looking.join().unwrap();
    });
}

#[test]
fn who_is_forgotten_while_an_image_is_taken_knows_nothing() {
    let image = with_a_chain(20_000).dump("w").unwrap();
    for wait in 0..40 {
        let index = Index::new();
        index.add_worker("w", "m", Facts::default());
        thread::scope(|scope| {
            let taking = scope.spawn(|| index.restore("w", &image));
            thread::sleep(Duration::from_micros(150 * wait));
            index.change_named("w", kvsync_index::Worker::forget);
            let _taken_or_too_late = taking.join().unwrap();
        });
        assert_eq!(blocks(&index), 0);
    }
}
