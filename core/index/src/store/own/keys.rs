//! Where blocks stand in chains, and lookups along those.

use std::hash::BuildHasher;

use hashbrown::hash_table::Entry;

use super::{Own, Place, Placement, Slot};
use crate::key::BlockKey;

/// Where a block stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Spot {
    pub key: BlockKey,
    /// Blocks before it in its chain.
    pub depth: u32,
    /// Both hang on an adopted name.
    pub guessed: bool,
}

impl Spot {
    /// Of the block with this key that stands behind this one.
    pub(crate) fn next(self, key: BlockKey) -> Self {
        Self { key, depth: self.depth.saturating_add(1), guessed: self.guessed }
    }
}

impl Own {
    /// Where a block stands that has a key.
    pub(crate) fn spot(&self, slot: Slot) -> Option<Spot> {
        let block = &self.blocks[slot];
        (block.placement != Placement::None).then(|| Spot {
            key: block.key,
            depth: block.depth,
            guessed: block.placement == Placement::Guessed,
        })
    }

    /// Have several blocks this key?
    pub(crate) fn is_hidden(&self, key: BlockKey) -> bool {
        self.hidden.contains_key(&key)
    }

    /// Are there keys that several blocks have?
    pub(crate) fn any_hidden(&self) -> bool {
        !self.hidden.is_empty()
    }

    /// The one block that has this key.
    pub(super) fn find_key(&self, key: BlockKey) -> Option<Slot> {
        self.keys.find(self.hasher.hash_one(key), |slot| self.blocks[*slot].key == key).copied()
    }

    /// Give a block without a key its place in a chain; a guess gives way to every other block that has its key.
    pub(crate) fn set_spot(&mut self, slot: Slot, spot: Spot) {
        debug_assert!(
            self.spot(slot).is_none_or(|before| before.guessed && !spot.guessed),
            "a known hash keeps its key"
        );
        self.unplace(slot);
        let Spot { key, depth, guessed } = spot;
        let placement = if let Some(others) = self.hidden.get_mut(&key) {
            if guessed {
                return;
            }
            *others += 1;
            Placement::Hidden
        } else {
            let Self { blocks, keys, hasher, .. } = self;
            let entry = keys.entry(
                hasher.hash_one(key),
                |slot| blocks[*slot].key == key,
                |slot| hasher.hash_one(blocks[*slot].key),
            );
            match entry {
                Entry::Occupied(_) if guessed => return,
                Entry::Occupied(mut found) if blocks[*found.get()].placement == Placement::Guessed => {
                    let guess = std::mem::replace(found.get_mut(), slot);
                    self.forget_placement(guess);
                    Placement::Known
                }
                Entry::Occupied(found) => {
                    let (twin, _) = found.remove();
                    blocks[twin].placement = Placement::Hidden;
                    self.hidden.insert(key, 2);
                    Placement::Hidden
                }
                Entry::Vacant(vacant) => {
                    vacant.insert(slot);
                    if guessed { Placement::Guessed } else { Placement::Known }
                }
            }
        };
        let block = &mut self.blocks[slot];
        (block.key, block.depth, block.placement) = (key, depth, placement);
        self.touched.push((key, depth));
        self.totals.placed += 1;
        self.totals.guessed += u64::from(guessed);
    }

    /// Take a block's key away, if it has one.
    pub(super) fn unplace(&mut self, slot: Slot) {
        let key = self.blocks[slot].key;
        match self.blocks[slot].placement {
            Placement::None => return,
            Placement::Known | Placement::Guessed => {
                if let Ok(entry) = self.keys.find_entry(self.hasher.hash_one(key), |other| *other == slot) {
                    entry.remove();
                }
            }
            Placement::Hidden => {
                if let Some(left) = self.hidden.get_mut(&key) {
                    *left -= 1;
                    if *left == 0 {
                        self.hidden.remove(&key);
                    }
                }
            }
        }
        self.forget_placement(slot);
    }

    /// Of a block that no table finds by its key any more.
    fn forget_placement(&mut self, slot: Slot) {
        let block = &mut self.blocks[slot];
        self.totals.placed -= 1;
        self.totals.guessed -= u64::from(block.placement == Placement::Guessed);
        block.placement = Placement::None;
        self.touched.push((block.key, block.depth));
    }

    /// Has any block this key?
    pub(crate) fn has_key(&self, key: BlockKey) -> bool {
        self.find_key(key).is_some() || self.is_hidden(key)
    }

    /// Keys that a block got or lost since this was last asked.
    pub(crate) fn take_touched(&mut self) -> Vec<(BlockKey, u32)> {
        std::mem::take(&mut self.touched)
    }

    /// A lookup along a chain of keys.
    pub(crate) fn walk(&self) -> Walk<'_> {
        Walk { own: self, next: 0 }
    }
}

/// Looks keys up, faster where each follows the one before.
#[derive(Debug)]
pub(crate) struct Walk<'s> {
    own: &'s Own,
    next: usize,
}

impl Walk<'_> {
    /// Does the place hold the one block of this key? Doubtful copies and guessed blocks count with `even_doubtful`.
    #[inline]
    pub(crate) fn held(&mut self, place: Place, key: BlockKey, even_doubtful: bool) -> bool {
        self.find(key).is_some_and(|slot| {
            let block = &self.own.blocks[slot];
            let copies = if place == Place::HOME { block.home } else { self.own.copies(place, slot) };
            copies.held(even_doubtful) && (even_doubtful || block.placement != Placement::Guessed)
        })
    }

    #[inline]
    pub(super) fn find(&mut self, key: BlockKey) -> Option<Slot> {
        let at = self.next;
        match self.own.blocks.get(at) {
            Some(block) if block.key == key && block.placement == Placement::Known => {
                self.next += 1;
                Some(Slot(at as u32))
            }
            _ => self.probe(key),
        }
    }

    #[cold]
    fn probe(&mut self, key: BlockKey) -> Option<Slot> {
        let slot = self.own.find_key(key)?;
        self.next = slot.at() + 1;
        Some(slot)
    }
}
