//! Which unknown parents may be the last blocks of observed runs.
//!
//! A store whose parent is unknown (an *orphan*) and whose first block is what a run's prompt goes on with may well have
//! that run's last block as its parent. That is a guess: two prompts may go on alike. So what is placed through such a
//! name is expected, never credit.

use std::collections::VecDeque;

use hashbrown::HashMap;

use crate::event::EngineHash;
use crate::store::Spot;

/// Names per worker; the oldest makes room.
pub const NAMES: usize = 4096;

/// Where the blocks stand of which some hashes are taken for the names.
#[derive(Debug, Default)]
pub(crate) struct Names {
    spots: HashMap<EngineHash<'static>, Spot>,
    /// By age.
    order: VecDeque<EngineHash<'static>>,
}

impl Names {
    /// Where the block stands of which this hash is the name.
    pub(crate) fn get(&self, hash: &EngineHash<'_>) -> Option<Spot> {
        if self.spots.is_empty() {
            return None;
        }
        let spots: &HashMap<EngineHash<'_>, Spot> = &self.spots;
        spots.get(hash).copied()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.spots.is_empty()
    }

    /// Take a hash that is no name for the name of a block.
    pub(crate) fn give(&mut self, hash: &EngineHash<'_>, spot: Spot) {
        debug_assert!(spot.guessed && self.get(hash).is_none());
        if self.order.len() == NAMES
            && let Some(oldest) = self.order.pop_front()
        {
            self.spots.remove(&oldest);
        }
        let hash = hash.to_owned_hash();
        self.order.push_back(hash.clone());
        self.spots.insert(hash, spot);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::BlockKey;

    #[test]
    fn the_oldest_name_makes_room() {
        let hash = |number: u64| EngineHash::Unsigned(number);
        let spot = |number: u64| Spot { key: BlockKey(number), depth: 1, guessed: true };
        let mut names = Names::default();
        (0..=NAMES as u64).for_each(|number| names.give(&hash(number), spot(number)));
        assert_eq!((names.get(&hash(0)), names.get(&hash(1))), (None, Some(spot(1))));
        assert_eq!(names.spots.len(), NAMES);
    }
}
