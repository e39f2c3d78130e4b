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
