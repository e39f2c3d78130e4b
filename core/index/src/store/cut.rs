//! Making room when all workers together hold too much: what goes first, and what that leaves.
//!
//! Whole classes go, so that two indexes that saw the same drop the same: blocks without a key, then those that no
//! lookup found since the last time, deepest first, then those that some lookup found, deepest first. A tail is worth
//! less than what stands before it, and without that it is worth nothing. What a lookup found at one worker is found at
//! all workers of its model.

use std::hash::BuildHasher;

use hashbrown::HashMap;

use super::{Alias, Store};
use crate::shared::{Shared, Tally};

/// How many blocks there are of each class, over all that was counted.
#[derive(Debug, Default)]
pub(crate) struct Census {
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
    /// Count blocks with a key in.
    pub(crate) fn add(&mut self, depth: u32, read: bool, blocks: u64) {
        *if read { &mut self.read } else { &mut self.unread }.entry(depth).or_default() += blocks;
    }

    /// The first classes, as many as it takes to leave at most `target` blocks.
    pub(crate) fn plan(self, target: u64) -> Cut {
        let mut left = self.unplaced + self.unread.values().sum::<u64>() + self.read.values().sum::<u64>();
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

impl Cut {
    /// Does the class of a block with a key go?
    pub(crate) fn takes(&self, depth: u32, read: bool) -> bool {
        let from = if read { self.read } else { self.unread };
        from.is_some_and(|from| depth >= from)
    }
}

impl Store {
    /// Count the blocks of the own store in.
    pub(crate) fn census(&self, shared: &Shared, census: &mut Census) {
        for spot in self.own.spots() {
            match spot {
                None => census.unplaced += 1,
                Some((key, depth)) => census.add(depth, shared.is_key_read(key), 1),
            }
        }
    }

    /// Drop the blocks of the own store that are of these classes, and the names of the plain ones. Returns how many of
    /// the own store went.
    pub(crate) fn cut(&mut self, shared: &mut Shared, cut: &Cut) -> u64 {
        let dropped = self.own.cut(|spot| match spot {
            None => cut.unplaced,
            Some((key, depth)) => cut.takes(depth, shared.is_key_read(key)),
        });
        self.sync(shared);
        let goes = |alias: &&Alias| cut.takes(shared.depth(alias.slot), shared.is_read(alias.slot));
        let gone: Vec<_> = self.aliases.iter().filter(goes).copied().collect();
        let Self { aliases, hasher, .. } = self;
        for Alias { name, slot } in gone {
            let same = |other: &Alias| other.name == name && other.slot == slot;
            let hash = |alias: &Alias| hasher.hash_one(alias.name());
            aliases.remove(hash(&Alias { name, slot }), same, hash);
        }
        dropped
    }

    /// Take out of the count what was dropped of its plain blocks. Returns how many those are.
    pub(crate) fn settle(&mut self, dropped: &Tally) -> u64 {
        let plain = self.member.map_or(0, |member| dropped.of(member));
        self.plain -= plain;
        plain
    }
}
