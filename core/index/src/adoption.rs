//! Which unknown parents are the last blocks of observed runs: names, and what refutes them.
//!
//! A store whose parent is unknown (an *orphan*) and whose first block is what a run's prompt goes on with has that run's
//! last block as its parent, if nothing else goes on like that. That is a guess: two prompts may go on alike. A second
//! orphan with the same content refutes it, and so does a block that has the key itself; the key is *disputed* then,
//! nothing counts that stands behind it, and what was removed by its name may have been any block.
//!
//! What must always hold: no two names have the same key or the same content; a disputed key stays so for as long as
//! anything may stand behind it, which is until all that is known of the worker goes.

use std::collections::VecDeque;

use hashbrown::{HashMap, HashSet};

use crate::event::EngineHash;
use crate::key::BlockKey;
use crate::store::Spot;

/// Names per worker; the oldest makes room.
pub const NAMES: usize = 4096;
/// Disputed keys per worker; with so many, no more names are given.
pub const DISPUTED: usize = 4096;

/// What a hash is the name of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Named {
    /// The key of the block.
    pub key: BlockKey,
    /// Blocks before it in its chain.
    pub depth: u32,
    /// The content of the block behind it.
    pub content: BlockKey,
}

impl Named {
    /// Where the block stands, which hangs on this name itself.
    pub(crate) fn spot(self) -> Spot {
        Spot { key: self.key, depth: self.depth, via: Some(self.key) }
    }
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Names {
    names: HashMap<EngineHash<'static>, Named>,
    /// By age.
    order: VecDeque<EngineHash<'static>>,
    of_key: HashMap<BlockKey, EngineHash<'static>>,
    of_content: HashMap<BlockKey, BlockKey>,
    disputed: HashSet<BlockKey>,
}

impl Names {
    pub(crate) fn is_empty(&self) -> bool {
        self.names.is_empty() && self.disputed.is_empty()
    }

    /// What this hash is the name of.
    pub(crate) fn get(&self, hash: &EngineHash<'_>) -> Option<Named> {
        if self.names.is_empty() {
            return None;
        }
        let names: &HashMap<EngineHash<'_>, Named> = &self.names;
        names.get(hash).copied()
    }

    /// The key of the name that was given for this content.
    pub(crate) fn with_content(&self, content: BlockKey) -> Option<BlockKey> {
        self.of_content.get(&content).copied()
    }

    /// The hash that is the name of this key.
    pub(crate) fn of_key(&self, key: BlockKey) -> Option<&EngineHash<'static>> {
        self.of_key.get(&key)
    }

    /// Give a name to a key that has none.
    pub(crate) fn give(&mut self, hash: &EngineHash<'_>, named: Named) {
        let hash = hash.to_owned_hash();
        if self.order.len() == NAMES
            && let Some(oldest) = self.order.pop_front()
            && let Some(named) = self.names.remove(&oldest)
        {
            self.of_key.remove(&named.key);
            self.of_content.remove(&named.content);
        }
        self.order.push_back(hash.clone());
        self.of_key.insert(named.key, hash.clone());
        self.of_content.insert(named.content, named.key);
        self.names.insert(hash, named);
    }

    /// May one more name be given?
    pub(crate) fn may_give(&self) -> bool {
        self.disputed.len() < DISPUTED
    }

    /// Something refutes what stands behind this key; false when that is known already.
    pub(crate) fn dispute(&mut self, key: BlockKey) -> bool {
        self.disputed.insert(key)
    }

    /// Is anything disputed?
    pub(crate) fn any_disputed(&self) -> bool {
        !self.disputed.is_empty()
    }

    pub(crate) fn is_disputed(&self, key: BlockKey) -> bool {
        self.disputed.contains(&key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(number: u64) -> EngineHash<'static> {
        EngineHash::Unsigned(number)
    }

    fn named(number: u64) -> Named {
        Named { key: BlockKey(number), depth: 1, content: BlockKey(!number) }
    }

    #[test]
    fn the_oldest_name_makes_room() {
        let mut names = Names::default();
        (0..=NAMES as u64).for_each(|number| names.give(&hash(number), named(number)));
        assert_eq!(names.get(&hash(0)), None);
        assert_eq!((names.of_key(BlockKey(0)), names.with_content(BlockKey(!0))), (None, None));
        assert_eq!(names.get(&hash(1)), Some(named(1)));
        assert_eq!((names.of_key(BlockKey(1)), names.with_content(BlockKey(!1))), (Some(&hash(1)), Some(BlockKey(1))));
        assert_eq!(names.names.len(), NAMES);
    }

    #[test]
    fn a_dispute_outlives_its_name_and_ends_the_giving() {
        let mut names = Names::default();
        assert!(names.may_give() && !names.any_disputed());
        assert!(names.dispute(BlockKey(0)) && !names.dispute(BlockKey(0)));
        (0..=NAMES as u64).for_each(|number| names.give(&hash(number), named(number)));
        assert!(names.is_disputed(BlockKey(0)));
        (1..DISPUTED as u64).for_each(|number| assert!(names.dispute(BlockKey(number))));
        assert!(!names.may_give());
    }
}
