//! The runs against a plain list of them.

use proptest::prelude::*;

use super::*;

fn key(number: u64) -> BlockKey {
    BlockKey(number)
}

/// Runs are the prefixes of few chains, so that they share keys; a key tells its chain and its depth.
fn run(chain: u64, length: u64, position: u64) -> Observed {
    // chains 2 and 3 part from 0 and 1 behind the second block
    let keys = (0..length).map(|at| key(1 + at + 100 * if at < 2 { chain % 2 } else { chain })).collect();
    Observed {
        keys,
        next: length.is_multiple_of(2).then(|| key(1000 + chain % 2)),
        until: position as f64 + 3.0,
        position,
    }
}

#[derive(Debug, Clone)]
enum Step {
    Observe(u64, u64),
    Doubt,
    EndWith(u64, u64),
    Expire(f64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        5 => (0u64..4, 1u64..5).prop_map(|(chain, length)| Step::Observe(chain, length)),
        1 => Just(Step::Doubt),
        2 => (0u64..4, 0u64..4).prop_map(|(chain, at)| Step::EndWith(1 + at + 100 * chain, u64::MAX)),
        1 => (0u64..4, 0u64..40).prop_map(|(at, position)| Step::EndWith(1 + at, position)),
        1 => (0.0..30.0).prop_map(Step::Expire),
    ];
    prop::collection::vec(step, 0..40)
}

proptest! {
    #[test]
    fn equals_a_plain_list(steps in steps()) {
        let mut runs = Runs::default();
        let mut list: Vec<(Observed, bool)> = Vec::new();
        for (at, step) in steps.iter().enumerate() {
            let position = at as u64 + 1;
            match *step {
                Step::Observe(chain, length) => {
                    prop_assert_eq!(runs.observe(run(chain, length, position)), 0);
                    let made = run(chain, length, position);
                    list.retain(|(run, _)| run.last() != made.last());
                    list.push((made, true));
                }
                Step::Doubt => {
                    runs.doubt(position);
                    list.iter_mut().for_each(|(_, live)| *live = false);
                }
                Step::EndWith(number, before) => {
                    runs.end_with(key(number), before);
                    list.retain(|(run, _)| run.position > before || !run.keys.contains(&key(number)));
                }
                Step::Expire(now) => {
                    runs.expire(now);
                    list.retain(|(run, _)| run.until > now);
                }
            }
            let mut held = 0;
            for number in 0..500 {
                let mut of_key = list.iter().filter(|(run, _)| run.keys.contains(&key(number)));
                prop_assert_eq!(runs.holds(key(number), true), of_key.clone().next().is_some());
                let lives = of_key.any(|(_, live)| *live);
                prop_assert_eq!(runs.holds(key(number), false), lives);
                held += usize::from(lives);
            }
            prop_assert_eq!(runs.held(), held);
            prop_assert_eq!(runs.keys, list.iter().map(|(run, _)| run.keys.len()).sum::<usize>());
            for content in [key(1000), key(1001)] {
                let newest = list.iter().map(|(run, _)| run).rfind(|run| run.next == Some(content));
                let newest = newest.map(|run| (run.last(), run.keys.len() as u32));
                prop_assert_eq!(runs.before(content), newest);
            }
        }
        runs.expire(f64::INFINITY);
        prop_assert!(runs.is_empty() && runs.with.is_empty() && runs.with_last.is_empty() && runs.with_next.is_empty());
    }
}

#[test]
fn the_oldest_run_makes_room_even_the_new_one() {
    let long = |first: u64, length: usize, position| Observed {
        keys: (first..).take(length).map(key).collect(),
        next: None,
        until: 1.0,
        position,
    };
    let mut runs = Runs::default();
    assert_eq!(runs.observe(long(0, 10, 1)), 0);
    assert_eq!(runs.observe(long(100, OBSERVED_KEYS - 10, 2)), 0);
    assert_eq!(runs.observe(long(1 << 20, 1, 3)), 1);
    assert!(!runs.holds(key(0), true) && runs.holds(key(100), false) && runs.holds(key(1 << 20), false));
    assert_eq!(runs.observe(long(1 << 21, OBSERVED_KEYS + 1, 4)), 3);
    assert!(runs.is_empty() && runs.held() == 0);
}
