//! Stores that wait until their parent has a key, never attached to the root meanwhile.
//!
//! Bounded in number and bytes; the oldest makes room. Time is the order of parking, so that two indexes that see the
//! same events drop the same ones.

use std::collections::BTreeMap;

use hashbrown::HashMap;

use crate::event::{EngineHash, Run};

/// Stores that may wait, per worker.
pub const PARKED_EVENTS: usize = 4096;
/// Bytes that they may take, per worker (see [`Run::size`]).
pub const PARKED_BYTES: usize = 16 << 20;

#[derive(Debug, Default)]
pub(crate) struct Parked {
    runs: BTreeMap<u64, Run<'static>>,
    under: HashMap<EngineHash<'static>, Vec<u64>>,
    bytes: usize,
    next: u64,
}

impl Parked {
    pub(crate) fn len(&self) -> usize {
        self.runs.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// Park a run under the parent that it names; returns how many were dropped to make room.
    pub(crate) fn park(&mut self, run: Run<'static>) -> usize {
        let Some(parent) = run.parent.clone() else {
            debug_assert!(false, "a run without a parent starts at the root and never waits");
            return 0;
        };
        self.under.entry(parent).or_default().push(self.next);
        self.bytes += run.size();
        self.runs.insert(self.next, run);
        self.next += 1;
        let mut dropped = 0;
        while self.runs.len() > PARKED_EVENTS || self.bytes > PARKED_BYTES {
            let Some((number, run)) = self.runs.pop_first() else {
                break;
            };
            self.bytes -= run.size();
            if let Some(parent) = &run.parent
                && let Some(siblings) = self.under.get_mut(parent)
            {
                siblings.retain(|&sibling| sibling != number);
                if siblings.is_empty() {
                    self.under.remove(parent);
                }
            }
            dropped += 1;
        }
        dropped
    }

    /// Those that wait for this hash, oldest first; they wait no longer.
    pub(crate) fn take_under(&mut self, parent: &EngineHash<'_>) -> Vec<Run<'static>> {
        if !self.waits_for(parent) {
            return Vec::new();
        }
        let numbers = self.under.remove(&parent.to_owned_hash()).unwrap_or_default();
        let runs: Vec<_> = numbers.iter().filter_map(|number| self.runs.remove(number)).collect();
        self.bytes -= runs.iter().map(Run::size).sum::<usize>();
        runs
    }

    /// Does anything wait for this hash?
    pub(crate) fn waits_for(&self, parent: &EngineHash<'_>) -> bool {
        let under: &HashMap<EngineHash<'_>, _> = &self.under;
        under.contains_key(parent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::Adapter;

    fn run(parent: u64, tokens: usize) -> Run<'static> {
        Run {
            hashes: vec![EngineHash::Unsigned(7)],
            parent: Some(EngineHash::Unsigned(parent)),
            tokens: vec![0; tokens],
            block_size: 1,
            adapter: Adapter::None,
            extra_keys: None,
        }
    }

    #[test]
    fn what_waits_is_taken_once_oldest_first() {
        let mut parked = Parked::default();
        for tokens in 1..=3 {
            assert_eq!(parked.park(run(1, tokens)), 0);
        }
        parked.park(run(2, 9));
        let taken: Vec<_> = parked.take_under(&EngineHash::Unsigned(1)).iter().map(|run| run.tokens.len()).collect();
        assert_eq!(taken, [1, 2, 3]);
        assert!(parked.take_under(&EngineHash::Unsigned(1)).is_empty());
        assert_eq!((parked.len(), parked.bytes), (1, run(2, 9).size()));
    }

    #[test]
    fn the_oldest_makes_room() {
        let mut parked = Parked::default();
        for parent in 0..PARKED_EVENTS as u64 {
            assert_eq!(parked.park(run(parent, 0)), 0);
        }
        assert_eq!(parked.park(run(1, 0)), 1);
        assert!(!parked.waits_for(&EngineHash::Unsigned(0)));
        assert_eq!(parked.take_under(&EngineHash::Unsigned(1)).len(), 2);
    }

    #[test]
    fn bytes_are_bounded_even_for_a_single_run() {
        let mut parked = Parked::default();
        parked.park(run(0, 5));
        assert_eq!(parked.park(run(0, PARKED_BYTES / 4)), 2);
        assert!(parked.is_empty() && parked.under.is_empty());
        assert_eq!(parked.bytes, 0);
    }
}
