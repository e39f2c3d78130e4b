//! Making room when all workers together hold too much: what goes first, and what that leaves.
//!
//! Whole classes go, so that two indexes that saw the same drop the same: blocks without a key, then those that no
//! lookup found since the last time, deepest first, then those that some lookup found, deepest first. A tail is worth
//! less than what stands before it, and without that it is worth nothing.

use std::hash::BuildHasher;

use hashbrown::{HashMap, HashTable};

use super::{Copies, Place, Placement, Slot, Store};

/// How many blocks there are of each class, over all workers that were counted.
#[derive(Debug, Default)]
pub(crate) struct Census {
    total: u64,
    unplaced: u64,
    /// By depth.
    unread: HashMap<u32, u64>,
    read: HashMap<u32, u64>,
}

/// Which classes are to go.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Cut {
    unplaced: bool,
    /// From this depth on.
    unread: Option<u32>,
    read: Option<u32>,
}

impl Census {
    /// The first classes, as many as it takes to leave at most `target` blocks.
    pub(crate) fn plan(self, target: u64) -> Cut {
        let mut left = self.total;
        let mut cut = Cut::default();
        if left > target && self.unplaced > 0 {
            cut.unplaced = true;
            left -= self.unplaced;
        }
        for (counts, from) in [(self.unread, &mut cut.unread), (self.read, &mut cut.read)] {
            let mut counts: Vec<_> = counts.into_iter().collect();
            counts.sort_unstable();
            while left > target
                && let Some((depth, count)) = counts.pop()
            {
                *from = Some(depth);
                left -= count;
            }
        }
        cut
    }
}

impl Store {
    /// Count its blocks in.
    pub(crate) fn census(&self, census: &mut Census) {
        census.total += self.blocks() as u64;
        census.unplaced += self.blocks() as u64 - self.totals.placed;
        for block in self.blocks.iter().filter(|block| block.placement != Placement::None) {
            let counts = if block.is_read() { &mut census.read } else { &mut census.unread };
            *counts.entry(block.depth).or_default() += 1;
        }
    }

    /// Drop the blocks of these classes from every place; from then on no block is read. Returns how many went.
    pub(crate) fn cut(&mut self, cut: &Cut) -> u64 {
        let mut dropped = 0;
        // from the last slot down: slots are used again last freed first, and a chain wants them in ascending order
        for slot in (0..self.blocks.len()).rev().map(|at| Slot(at as u32)) {
            let block = &mut self.blocks[slot.at()];
            if block.places == 0 {
                continue;
            }
            let read = std::mem::take(block.read.get_mut());
            let from = if read { cut.read } else { cut.unread };
            if match block.placement {
                Placement::None => cut.unplaced,
                Placement::Known | Placement::Guessed | Placement::Hidden => {
                    from.is_some_and(|from| block.depth >= from)
                }
            } {
                for place in (0..self.tiers.len()).map(Place) {
                    self.set_copies(place, slot, Copies::default());
                }
                self.free_if_gone(slot);
                dropped += 1;
            }
        }
        if self.free.len() > self.blocks() {
            self.compact();
        }
        dropped
    }

    /// Give back what free slots take. The order of the blocks stays.
    fn compact(&mut self) {
        let live = self.blocks();
        let mut moved = HashMap::with_capacity(live);
        let blocks = std::mem::replace(&mut self.blocks, Vec::with_capacity(live));
        self.free = Vec::new();
        for (at, block) in blocks.into_iter().enumerate().filter(|(_, block)| block.places > 0) {
            moved.insert(Slot(at as u32), Slot(self.blocks.len() as u32));
            self.blocks.push(block);
        }
        let Self { blocks, hasher, .. } = self;
        let by_name = |slot: &Slot| hasher.hash_one(&blocks[slot.at()].name);
        let by_key = |slot: &Slot| hasher.hash_one(blocks[slot.at()].key);
        let mut names = HashTable::with_capacity(blocks.len());
        let mut keys = HashTable::with_capacity(blocks.len());
        for (at, block) in blocks.iter().enumerate() {
            let slot = Slot(at as u32);
            names.insert_unique(by_name(&slot), slot, by_name);
            if matches!(block.placement, Placement::Known | Placement::Guessed) {
                keys.insert_unique(by_key(&slot), slot, by_key);
            }
        }
        self.names = names;
        self.keys = keys;
        for side in &mut self.side {
            *side = side.drain().map(|(slot, copies)| (moved[&slot], copies)).collect();
        }
        self.doubtful = self.doubtful.drain().map(|(place, slot)| (place, moved[&slot])).collect();
    }
}
