//! Making room when all workers together hold too much: what goes first, and what that leaves.
//!
//! Whole classes go, so that two indexes that saw the same drop the same: blocks without a key, then those that no
//! lookup found since the last time, deepest first, then those that some lookup found, deepest first. A tail is worth
//! less than what stands before it, and without that it is worth nothing. What a lookup found at one worker is found at
//! all workers of its model.
//!
//! What must always hold: a step takes whole blocks, as if each had been let go by itself: name, seat and count together.
//! So a lookup or a change between two steps finds nothing that it could not find at any other time. What it changes of
//! the classes may save or cost a block this time.

use std::hash::BuildHasher;

use hashbrown::HashMap;

use super::{Alias, Store};
use crate::shared::{Kind, Shared, Tally};
use crate::steps::Steps;
use crate::table;

/// How many blocks there are of each class, over all that was counted.
#[derive(Debug, Default)]
pub(crate) struct Census {
    unplaced: u64,
    /// By depth.
    unread: HashMap<u32, u64>,
    read: HashMap<u32, u64>,
    /// What is not counted yet: depth, was it read, how many.
    noted: Vec<(u32, bool, u64)>,
    /// Reads do not count.
    blind: bool,
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
    /// Note blocks with a key, which takes no longer under a lock than it must.
    pub(crate) fn add(&mut self, depth: u32, read: bool, blocks: u64) {
        self.noted.push((depth, read, blocks));
    }

    /// Count what was noted.
    pub(crate) fn count(&mut self) {
        for (depth, read, blocks) in self.noted.drain(..) {
            *if read && !self.blind { &mut self.read } else { &mut self.unread }.entry(depth).or_default() += blocks;
        }
    }

    /// As if none was read, whatever is until it is dropped.
    pub(crate) fn blind() -> Self {
        Self { blind: true, ..Self::default() }
    }

    /// The first classes, as many as it takes to leave at most `target` blocks.
    pub(crate) fn plan(mut self, target: u64) -> Cut {
        self.count();
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
        if self.blind { Cut { read: cut.unread, ..cut } } else { cut }
    }
}

impl Cut {
    /// Does the class of a block with a key go?
    pub(crate) fn takes(&self, depth: u32, read: bool) -> bool {
        let from = if read { self.read } else { self.unread };
        from.is_some_and(|from| depth >= from)
    }
}

/// How far one worker's store was gone through, by its own store and then by its aliases; at the end, the memory is given
/// back that the own store took.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rest {
    /// So many slots of its own store, and all aliases.
    Own(usize),
    Aliases(table::Place),
    Memory,
}

impl Rest {
    pub(crate) const ALL: Self = Self::Own(usize::MAX);
}

impl Store {
    /// Count blocks of the own store in, from a slot on. Returns where the others begin, if there are any.
    pub(crate) fn census(&self, shared: &Shared, census: &mut Census, from: usize, steps: &mut Steps) -> Option<usize> {
        let rest = self.own.spots(from, steps, |spot| match spot {
            None => census.unplaced += 1,
            Some((key, depth)) => census.add(depth, shared.is_key_read(key), 1),
        });
        (rest < self.own.slots()).then_some(rest)
    }

    /// Drop the blocks of these classes that no other worker's name finds: those of the own store, then those that have an
    /// alias. Returns how many went, and what was not gone through.
    pub(crate) fn cut(&mut self, shared: &mut Shared, cut: &Cut, rest: Rest, steps: &mut Steps) -> (u64, Option<Rest>) {
        let (mut dropped, mut from) = (0, table::Place::default());
        match rest {
            Rest::Own(slots) => {
                let (gone, slots) = self.own.cut(slots, steps, |spot| match spot {
                    None => cut.unplaced,
                    Some((key, depth)) => cut.takes(depth, shared.is_key_read(key)),
                });
                self.sync(shared);
                if slots > 0 {
                    return (gone, Some(Rest::Own(slots)));
                }
                dropped += gone;
            }
            Rest::Aliases(place) => from = place,
            Rest::Memory => return (0, (!self.tidy(steps)).then_some(Rest::Memory)),
        }
        let Self { aliases, hasher, .. } = self;
        let goes = |alias: &Alias| cut.takes(shared.depth(alias.slot), shared.is_read(alias.slot));
        let (gone, rest) = aliases.take_out(from, steps, goes, |alias| hasher.hash_one(alias.name()));
        for alias in &gone {
            let member = self.member(shared);
            shared.leave(alias.slot, member, Kind::Alias);
        }
        self.plain -= gone.len() as u64;
        (dropped + gone.len() as u64, Some(rest.map_or(Rest::Memory, Rest::Aliases)))
    }

    /// Take out of the count what was dropped of its plain blocks under shared names. Returns how many those are.
    pub(crate) fn settle(&mut self, dropped: &Tally) -> u64 {
        let named = self.member.map_or(0, |member| dropped.of(member));
        self.plain -= named;
        named
    }
}
