//! Where a worker stands in its removals and losses: was a block there all the time since a lookup?
//!
//! A *position* counts all that may take a block away, and the moments to which that is compared. The keys that the last
//! [`REMOVALS`] removals named are remembered; of an earlier time, nothing is claimed. A registration begins at a number
//! of its own, so that a lookup of another one is never taken for one of its own.

use std::collections::VecDeque;

use hashbrown::HashSet;

use crate::key::BlockKey;

/// Removals whose keys are remembered, per worker.
pub const REMOVALS: usize = 4096;

/// A registration has this many bits of positions for its own.
const POSITION_BITS: u32 = 40;

/// The moment of a lookup, as it is handed out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AsOf {
    /// The position at that moment.
    pub position: u64,
    /// The credit leant on what answers showed: a removal that may have named any block may have named one of those.
    pub leaned: bool,
}

impl AsOf {
    pub(crate) fn pack(self) -> u64 {
        (self.position << 1) | u64::from(self.leaned)
    }

    pub(crate) fn unpack(packed: u64) -> Self {
        Self { position: packed >> 1, leaned: packed & 1 == 1 }
    }
}

/// The removals since a lookup.
#[derive(Debug)]
pub(crate) struct Since {
    keys: HashSet<BlockKey>,
    /// One of them may have named any block.
    pub keyless: bool,
}

impl Since {
    /// Did any of them name a block that has a key?
    pub(crate) fn any_named(&self) -> bool {
        !self.keys.is_empty()
    }

    /// Did one of them name this block?
    pub(crate) fn named(&self, key: BlockKey) -> bool {
        self.keys.contains(&key)
    }
}

#[derive(Debug)]
pub(crate) struct Removals {
    position: u64,
    /// Positions and keys of the last removals of blocks that have one.
    log: VecDeque<(u64, BlockKey)>,
    /// Nothing is claimed of the time before.
    lost_at: u64,
    /// The last removal that may have named any block.
    keyless_at: u64,
}

impl Removals {
    /// Of the registration with this number; the first is 1.
    pub(crate) fn new(registration: u64) -> Self {
        let position = registration << POSITION_BITS;
        Self { position, log: VecDeque::new(), lost_at: position, keyless_at: 0 }
    }

    /// Where all that was known went for the last time.
    pub(crate) fn lost_at(&self) -> u64 {
        self.lost_at
    }

    /// Bytes of memory that it takes.
    pub(crate) fn bytes(&self) -> usize {
        self.log.capacity() * size_of::<(u64, BlockKey)>()
    }

    pub(crate) fn position(&self) -> u64 {
        self.position
    }

    /// Something happened to which others are compared; returns its position.
    pub(crate) fn step(&mut self) -> u64 {
        self.position += 1;
        self.position
    }

    /// A removal named this block; without a key it may be any. Returns its position.
    pub(crate) fn named(&mut self, key: Option<BlockKey>) -> u64 {
        let position = self.step();
        let Some(key) = key else {
            self.keyless_at = position;
            return position;
        };
        if self.log.len() == REMOVALS
            && let Some((dropped, _)) = self.log.pop_front()
        {
            self.lost_at = self.lost_at.max(dropped);
        }
        self.log.push_back((position, key));
        position
    }

    /// Blocks went without a removal.
    pub(crate) fn lose(&mut self) {
        self.lose_some();
        self.end_loss();
    }

    /// Blocks went without a removal, and more may follow: until that is over or something else happens, nothing will be
    /// claimed of the time since a lookup either.
    pub(crate) fn lose_some(&mut self) {
        self.lost_at = self.position + 1;
        self.log.clear();
    }

    /// No more follow. However many went, it is one moment.
    pub(crate) fn end_loss(&mut self) {
        self.position = self.position.max(self.lost_at);
    }

    /// The removals since a lookup; `None` when nothing can be claimed of the time since then.
    pub(crate) fn since(&self, lookup: AsOf) -> Option<Since> {
        let AsOf { position, leaned } = lookup;
        let keyless = self.keyless_at > position;
        if !(self.lost_at..=self.position).contains(&position) || (leaned && keyless) {
            return None;
        }
        let first = self.log.partition_point(|(at, _)| *at <= position);
        Some(Since { keys: self.log.range(first..).map(|(_, key)| *key).collect(), keyless })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(number: u64) -> BlockKey {
        BlockKey(number)
    }

    fn as_of(removals: &Removals, leaned: bool) -> AsOf {
        AsOf { position: removals.position(), leaned }
    }

    #[test]
    fn what_was_named_since_a_lookup() {
        let mut removals = Removals::new(1);
        let start = as_of(&removals, false);
        removals.named(Some(key(7)));
        let later = as_of(&removals, false);
        removals.named(Some(key(8)));
        let since = removals.since(later).expect("remembered");
        assert!(since.named(key(8)) && !since.named(key(7)) && !since.keyless);
        assert!(removals.since(start).expect("remembered").named(key(7)));
        assert!(!removals.since(as_of(&removals, true)).expect("now").named(key(8)));
    }

    #[test]
    fn a_keyless_removal_may_have_named_what_a_lookup_leant_on() {
        let mut removals = Removals::new(1);
        let (leaned, not) = (as_of(&removals, true), as_of(&removals, false));
        removals.named(None);
        assert!(removals.since(leaned).is_none());
        assert!(removals.since(not).expect("remembered").keyless);
        assert!(!removals.since(as_of(&removals, true)).expect("now").keyless);
    }

    #[test]
    fn nothing_is_claimed_of_other_times() {
        let mut removals = Removals::new(2);
        let start = removals.position();
        let known = |removals: &Removals, position| removals.since(AsOf { position, leaned: false }).is_some();
        for position in [0, 1, 1 << POSITION_BITS, start - 1, start + 1, u64::MAX >> 1] {
            assert!(!known(&removals, position), "{position}");
        }
        for number in 0..REMOVALS as u64 {
            removals.named(Some(key(number)));
        }
        assert!(known(&removals, start));
        removals.named(Some(key(1)));
        assert!(!known(&removals, start) && known(&removals, start + 1), "the oldest is not remembered any more");
        let before = removals.position();
        removals.lose();
        assert!(!known(&removals, before) && known(&removals, before + 1));
    }

    #[test]
    fn nothing_is_claimed_of_lookups_while_blocks_go() {
        let mut removals = Removals::new(1);
        let before = as_of(&removals, false);
        removals.lose_some();
        let between = as_of(&removals, false);
        assert!(removals.since(between).is_none(), "more may go");
        removals.named(Some(key(7)));
        let later = as_of(&removals, false);
        removals.lose_some();
        assert!([before, between, later].into_iter().all(|lookup| removals.since(lookup).is_none()));
        removals.end_loss();
        assert!([before, between, later].into_iter().all(|lookup| removals.since(lookup).is_none()));
        assert!(removals.since(as_of(&removals, false)).is_some());
        let position = removals.position();
        removals.end_loss();
        assert_eq!(removals.position(), position, "nothing went");
    }

    #[test]
    fn an_older_registration_is_another_time() {
        let mut older = Removals::new(1);
        for number in 0..10 {
            older.named(Some(key(number)));
        }
        assert!(Removals::new(2).since(as_of(&older, false)).is_none());
    }

    #[test]
    fn what_is_handed_out_comes_back() {
        for (position, leaned) in [(0, false), (1 << POSITION_BITS, true), (u64::MAX >> 1, true)] {
            let lookup = AsOf { position, leaned };
            assert_eq!(AsOf::unpack(lookup.pack()), lookup);
        }
    }
}
