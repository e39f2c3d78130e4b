//! What answers told of a worker whose events are incomplete: runs of blocks, from a prompt's first one on.
//!
//! What an engine said it had, it has, until something may have taken it away. So a run is *live* until a removal that
//! may have named any block comes: then it is doubtful. A removal that names one of its blocks ends it, and so does its
//! time.
//!
//! What must always hold: a key is held exactly as long as some live run has it, and runs are bounded in keys.

use std::collections::{BTreeMap, BTreeSet};

use hashbrown::HashMap;

use crate::key::BlockKey;

/// Keys of all runs together, per worker; the oldest run makes room.
pub const OBSERVED_KEYS: usize = 65_536;

/// A run of blocks that an answer showed.
#[derive(Debug)]
pub(crate) struct Observed {
    /// Of its blocks; never empty.
    pub keys: Box<[BlockKey]>,
    /// What the prompt's next block holds, where a store that goes on with the run can be told by it.
    pub next: Option<BlockKey>,
    /// When it ends, by the caller's clock.
    pub until: f64,
    /// The worker's position when it was taken.
    pub position: u64,
}

impl Observed {
    fn last(&self) -> BlockKey {
        self.keys[self.keys.len() - 1]
    }
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Runs {
    /// By position, which is by age.
    runs: BTreeMap<u64, Observed>,
    /// The runs that have a key, by age.
    with: HashMap<BlockKey, Vec<u64>>,
    /// The last key tells a run from every other: it is made from all before it.
    with_last: HashMap<BlockKey, u64>,
    with_next: HashMap<BlockKey, BTreeSet<u64>>,
    /// Runs up to this position are doubtful.
    doubtful_to: u64,
    /// Keys of all runs together.
    keys: usize,
    /// Keys that a live run has.
    held: usize,
}

impl Runs {
    pub(crate) fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// Keys that some live run has.
    pub(crate) fn held(&self) -> usize {
        self.held
    }

    /// Bytes of memory that it takes, about.
    pub(crate) fn bytes(&self) -> usize {
        self.keys * (size_of::<BlockKey>() + size_of::<u64>()) + self.with.allocation_size()
    }

    /// Has a live run this key, or `even_doubtful` any?
    pub(crate) fn holds(&self, key: BlockKey, even_doubtful: bool) -> bool {
        self.with.get(&key).is_some_and(|runs| even_doubtful || self.newest_lives(runs))
    }

    fn newest_lives(&self, runs: &[u64]) -> bool {
        runs.last().is_some_and(|newest| *newest > self.doubtful_to)
    }

    /// Take a run; the same run of before is replaced. Returns how many runs were dropped to make room.
    pub(crate) fn observe(&mut self, run: Observed) -> u64 {
        if let Some(before) = self.with_last.get(&run.last()) {
            self.end(*before);
        }
        self.keys += run.keys.len();
        for key in &run.keys {
            let runs = self.with.entry(*key).or_default();
            self.held += usize::from(runs.last().is_none_or(|newest| *newest <= self.doubtful_to));
            runs.push(run.position);
        }
        self.with_last.insert(run.last(), run.position);
        if let Some(next) = run.next {
            self.with_next.entry(next).or_default().insert(run.position);
        }
        self.runs.insert(run.position, run);
        let mut dropped = 0;
        while self.keys > OBSERVED_KEYS
            && let Some((oldest, _)) = self.runs.first_key_value()
        {
            self.end(*oldest);
            dropped += 1;
        }
        dropped
    }

    /// A removal at this position, the present one, may have named any block.
    pub(crate) fn doubt(&mut self, position: u64) {
        self.doubtful_to = position;
        self.held = 0;
    }

    /// This block went, or was not there, at a position: runs end that have it from before.
    pub(crate) fn end_with(&mut self, key: BlockKey, position: u64) {
        if let Some(runs) = self.with.get(&key) {
            let before: Vec<_> = runs.iter().copied().take_while(|run| *run <= position).collect();
            before.into_iter().for_each(|run| self.end(run));
        }
    }

    /// End the runs whose time is over.
    pub(crate) fn expire(&mut self, now: f64) {
        let ended: Vec<u64> = self.runs.values().filter(|run| run.until <= now).map(|run| run.position).collect();
        for run in ended {
            self.end(run);
        }
    }

    fn end(&mut self, position: u64) {
        let Some(run) = self.runs.remove(&position) else {
            return;
        };
        self.keys -= run.keys.len();
        for key in &run.keys {
            let Some(mut runs) = self.with.remove(key) else {
                continue;
            };
            let lived = self.newest_lives(&runs);
            if let Ok(at) = runs.binary_search(&position) {
                runs.remove(at);
            }
            self.held -= usize::from(lived && !self.newest_lives(&runs));
            if !runs.is_empty() {
                self.with.insert(*key, runs);
            }
        }
        self.with_last.remove(&run.last());
        if let Some(next) = run.next
            && let Some(runs) = self.with_next.get_mut(&next)
        {
            runs.remove(&position);
            if runs.is_empty() {
                self.with_next.remove(&next);
            }
        }
    }

    /// The newest run whose next block has this content: its last key, and how many blocks it has.
    pub(crate) fn before(&self, content: BlockKey) -> Option<(BlockKey, u32)> {
        let run = self.runs.get(self.with_next.get(&content)?.last()?)?;
        Some((run.last(), run.keys.len() as u32))
    }
}

#[cfg(test)]
mod tests;
