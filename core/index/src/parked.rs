//! Stores that wait until their parent has a key, never attached to the root meanwhile.
//!
//! Bounded in number and bytes; the oldest makes room. Each has the worker's position when it came for its number.

use std::collections::BTreeMap;

use hashbrown::HashMap;

use crate::event::{EngineHash, Run};
use crate::key::BlockKey;

/// Stores that may wait, per worker.
pub const PARKED_EVENTS: usize = 4096;
/// Bytes that they may take, per worker (see [`Run::size`]).
pub const PARKED_BYTES: usize = 16 << 20;

/// A store that waits.
#[derive(Debug)]
pub(crate) struct Waiting {
    /// What is to be placed; it has a parent.
    pub run: Run<'static>,
    /// What its first block holds, if that has no extra keys.
    pub content: Option<BlockKey>,
}

#[derive(Debug, Default)]
pub(crate) struct Parked {
    waiting: BTreeMap<u64, Waiting>,
    under: HashMap<EngineHash<'static>, Vec<u64>>,
    bytes: usize,
}

impl Parked {
    pub(crate) fn len(&self) -> usize {
        self.waiting.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Bytes of memory that it takes, about.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes + self.waiting.len() * size_of::<Waiting>() + self.under.allocation_size()
    }

    /// Park a store under the parent that it names; numbers ascend. Returns what was dropped to make room.
    pub(crate) fn park(&mut self, number: u64, store: Waiting) -> Vec<Run<'static>> {
        let Some(parent) = store.run.parent.clone() else {
            debug_assert!(false, "a run without a parent starts at the root and never waits");
            return Vec::new();
        };
        self.under.entry(parent).or_default().push(number);
        self.bytes += store.run.size();
        self.waiting.insert(number, store);
        let mut dropped = Vec::new();
        while (self.waiting.len() > PARKED_EVENTS || self.bytes > PARKED_BYTES)
            && let Some((oldest, _)) = self.waiting.first_key_value()
        {
            let oldest = *oldest;
            dropped.extend(self.take(oldest));
        }
        dropped
    }

    /// Take one; it waits no longer.
    pub(crate) fn take(&mut self, number: u64) -> Option<Run<'static>> {
        let run = self.waiting.remove(&number)?.run;
        self.bytes -= run.size();
        if let Some(parent) = &run.parent
            && let Some(siblings) = self.under.get_mut(parent)
        {
            siblings.retain(|&sibling| sibling != number);
            if siblings.is_empty() {
                self.under.remove(parent);
            }
        }
        Some(run)
    }

    /// Those that wait for this hash, oldest first; they wait no longer.
    pub(crate) fn take_under(&mut self, parent: &EngineHash<'_>) -> Vec<Run<'static>> {
        if !self.waits_for(parent) {
            return Vec::new();
        }
        let numbers = self.under.remove(&parent.to_owned_hash()).unwrap_or_default();
        let runs: Vec<_> =
            numbers.iter().filter_map(|number| self.waiting.remove(number)).map(|store| store.run).collect();
        self.bytes -= runs.iter().map(Run::size).sum::<usize>();
        runs
    }

    /// The numbers of those whose first block holds this, oldest first.
    pub(crate) fn with_content(&self, content: BlockKey) -> Vec<u64> {
        let those = self.waiting.iter().filter(|(_, store)| store.content == Some(content));
        those.map(|(number, _)| *number).collect()
    }

    pub(crate) fn get(&self, number: u64) -> Option<&Waiting> {
        self.waiting.get(&number)
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

    fn store(parent: u64, tokens: usize) -> Waiting {
        let run = Run {
            hashes: vec![EngineHash::Unsigned(7)],
            parent: Some(EngineHash::Unsigned(parent)),
            tokens: vec![0; tokens],
            block_size: 1,
            adapter: Adapter::None,
            extra_keys: None,
        };
        Waiting { run, content: Some(BlockKey(parent)) }
    }

    #[test]
    fn what_waits_is_taken_once_oldest_first() {
        let mut parked = Parked::default();
        for number in 1..=3 {
            assert!(parked.park(number, store(1, number as usize)).is_empty());
        }
        parked.park(9, store(2, 9));
        let taken: Vec<_> = parked.take_under(&EngineHash::Unsigned(1)).iter().map(|run| run.tokens.len()).collect();
        assert_eq!(taken, [1, 2, 3]);
        assert!(parked.take_under(&EngineHash::Unsigned(1)).is_empty());
        assert_eq!((parked.len(), parked.bytes), (1, store(2, 9).run.size()));
        assert!(parked.take(9).is_some() && parked.take(9).is_none());
        assert!(parked.is_empty() && parked.under.is_empty() && parked.bytes == 0);
    }

    #[test]
    fn the_oldest_makes_room() {
        let mut parked = Parked::default();
        for parent in 0..PARKED_EVENTS as u64 {
            assert!(parked.park(parent + 10, store(parent, 0)).is_empty());
        }
        assert_eq!(parked.park(1 << 40, store(1, 0)).len(), 1);
        assert!(!parked.waits_for(&EngineHash::Unsigned(0)));
        assert_eq!(parked.with_content(BlockKey(1)), [11, 1 << 40]);
        assert_eq!(parked.take_under(&EngineHash::Unsigned(1)).len(), 2);
    }

    #[test]
    fn bytes_are_bounded_even_for_a_single_run() {
        let mut parked = Parked::default();
        parked.park(1, store(0, 5));
        assert_eq!(parked.park(2, store(0, PARKED_BYTES / 4)).len(), 2);
        assert!(parked.is_empty() && parked.under.is_empty());
        assert_eq!(parked.bytes, 0);
    }
}
