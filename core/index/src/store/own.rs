//! The blocks that one worker holds in a way of its own: names, copies, keys.
//!
//! One slot per distinct block; two hash tables find it, by engine hash and by block key, and hold nothing but
//! slot numbers. A block lives while any place (tier and group) holds a copy of it. The copies of the first place that
//! the worker speaks of, its *home*, stand with it; those of other places in side tables.
//!
//! What must always hold:
//!
//! * a block that no place holds is gone: name, key and slot;
//! * the table of keys finds exactly the placed blocks whose key no other live block has. Two live hashes for one key
//!   mean that the engine hides what tells them apart: such blocks are *hidden*, until all of them are gone;
//! * a *guessed* block has no key that any other block has: it gives way;
//! * the set of doubtful copies has exactly the places of blocks that are marked so.
//!
//! Why it is fast: the blocks of one event get consecutive slots, so a lookup first looks at the slot after its last
//! one, which is sequential memory, and probes a table only where that fails.

mod doubt;
mod keys;
mod slots;
mod snapshot;

use std::collections::BTreeMap;
use std::hash::BuildHasher;

use hashbrown::hash_table::Entry;
use hashbrown::{DefaultHashBuilder, HashMap, HashSet, HashTable};

use crate::event::{EngineHash, Tier};
use crate::key::BlockKey;
use crate::steps::Steps;

pub(crate) use keys::{Spot, Walk};
use slots::Slots;

/// The number of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Slot(u32);

impl Slot {
    fn at(self) -> usize {
        self.0 as usize
    }
}

/// The number of a place: a tier and a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Place(usize);

impl Place {
    pub(crate) const HOME: Self = Self(0);
}

/// Physical copies of one block in one place, and whether the last of them is in doubt.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Copies(u64);

impl Copies {
    const DOUBT: u64 = 1 << 63;

    fn count(self) -> u64 {
        self.0 & !Self::DOUBT
    }

    fn doubtful(self) -> bool {
        self.0 & Self::DOUBT != 0
    }

    /// At least one copy that is not in doubt, or `even_doubtful` any.
    fn held(self, even_doubtful: bool) -> bool {
        self.0 != 0 && (even_doubtful || !self.doubtful())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Placement {
    /// Its tokens or its parent are not known yet.
    None,
    /// The table of keys finds it.
    Known,
    /// The table of keys finds it, but the key may be another block's.
    Guessed,
    /// Another live hash has the same key.
    Hidden,
}

#[derive(Debug)]
struct Block {
    name: EngineHash<'static>,
    key: BlockKey,
    /// The copies of the home place.
    home: Copies,
    /// Blocks before it in its chain; of a block with a key.
    depth: u32,
    /// In how many places there are copies: at most as many as an engine has groups, in each tier.
    places: u16,
    placement: Placement,
}

impl Block {
    fn vacant() -> Self {
        Self {
            name: EngineHash::Unsigned(0),
            key: BlockKey(0),
            home: Copies::default(),
            depth: 0,
            places: 0,
            placement: Placement::None,
        }
    }

    /// Key and depth.
    fn spot(&self) -> Option<(BlockKey, u32)> {
        (self.placement != Placement::None).then_some((self.key, self.depth))
    }
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Own {
    blocks: Slots,
    names: HashTable<Slot>,
    keys: HashTable<Slot>,
    hidden: HashMap<BlockKey, u32>,
    places: BTreeMap<(Tier, i64), Place>,
    /// By number of place.
    tiers: Vec<Tier>,
    side: Vec<HashMap<Slot, Copies>>,
    doubtful: HashSet<(Place, Slot)>,
    /// Tables that are to be fitted to what is left in them, one at a time: those are not laid out in steps.
    wide: usize,
    /// Keys that a block got or lost since this was last taken; with their depth.
    touched: Vec<(BlockKey, u32)>,
    /// Bytes that names take apart from their slots.
    named: usize,
    hasher: DefaultHashBuilder,
    totals: Totals,
}

/// Sums over all blocks.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Totals {
    pub copies: u64,
    pub gpu_copies: u64,
    pub placed: u64,
    pub guessed: u64,
}

impl Own {
    pub(crate) fn totals(&self) -> Totals {
        self.totals
    }

    /// Distinct blocks.
    pub(crate) fn blocks(&self) -> usize {
        self.blocks.used()
    }

    /// Bytes of memory that it takes, about.
    pub(crate) fn bytes(&self) -> usize {
        let tables = self.names.allocation_size() + self.keys.allocation_size() + self.hidden.allocation_size();
        let side: usize = self.side.iter().map(HashMap::allocation_size).sum();
        self.blocks.bytes() + tables + side + self.doubtful.allocation_size() + self.named
    }

    // -- places

    pub(crate) fn place(&self, tier: Tier, group: i64) -> Option<Place> {
        self.places.get(&(tier, group)).copied()
    }

    pub(crate) fn place_or_new(&mut self, tier: Tier, group: i64) -> Place {
        let next = Place(self.places.len());
        let place = *self.places.entry((tier, group)).or_insert(next);
        if place == next {
            self.tiers.push(tier);
            if place != Place::HOME {
                self.side.push(HashMap::new());
            }
        }
        place
    }

    /// Every place of a tier, whatever the group.
    pub(crate) fn places_of(&self, tier: Tier) -> Vec<Place> {
        self.places.range((tier, i64::MIN)..=(tier, i64::MAX)).map(|(_, place)| *place).collect()
    }

    fn copies(&self, place: Place, slot: Slot) -> Copies {
        if place == Place::HOME {
            self.blocks[slot].home
        } else {
            self.side[place.0 - 1].get(&slot).copied().unwrap_or_default()
        }
    }

    fn set_copies(&mut self, place: Place, slot: Slot, new: Copies) {
        let old = self.copies(place, slot);
        let block = &mut self.blocks[slot];
        if place == Place::HOME {
            block.home = new;
        } else if new == Copies::default() {
            self.side[place.0 - 1].remove(&slot);
        } else {
            self.side[place.0 - 1].insert(slot, new);
        }
        block.places = block.places - u16::from(old.count() > 0) + u16::from(new.count() > 0);
        self.totals.copies = self.totals.copies - old.count() + new.count();
        if self.tiers[place.0] == Tier::Gpu {
            self.totals.gpu_copies = self.totals.gpu_copies - old.count() + new.count();
        }
        match (old.doubtful(), new.doubtful()) {
            (false, true) => drop(self.doubtful.insert((place, slot))),
            (true, false) => drop(self.doubtful.remove(&(place, slot))),
            _ => {}
        }
    }

    /// The tier of a place, if the worker has spoken of it.
    pub(crate) fn tier(&self, place: Place) -> Option<Tier> {
        self.tiers.get(place.0).copied()
    }

    // -- copies

    /// One copy more; it takes doubt away.
    pub(crate) fn add(&mut self, place: Place, name: &EngineHash<'_>) -> Slot {
        let slot = self.slot_of(name);
        let copies = self.copies(place, slot);
        self.set_copies(place, slot, Copies(copies.count() + 1));
        slot
    }

    /// One copy less, or `left` copies left; with `doubt` what is left of an uncounted removal is doubtful.
    ///
    /// False when the block was not known to be there. The slot is no longer valid when that was its last copy.
    pub(crate) fn remove(&mut self, place: Place, slot: Slot, left: Option<u32>, doubt: bool) -> bool {
        let had = self.copies(place, slot);
        if had.count() == 0 {
            return false;
        }
        let now = left.map_or(had.count() - 1, u64::from);
        let doubtful = now > 0 && (had.doubtful() || (doubt && left.is_none()));
        self.set_copies(place, slot, Copies(now | if doubtful { Copies::DOUBT } else { 0 }));
        self.free_if_gone(slot);
        true
    }

    /// Where a block stands of which there is nothing to tell but that.
    pub(crate) fn plain(&self, slot: Slot) -> Option<Spot> {
        let block = &self.blocks[slot];
        let plain = block.placement == Placement::Known && block.places == 1 && block.home == Copies(1);
        plain.then_some(Spot { key: block.key, depth: block.depth, guessed: false })
    }

    /// Take a block out that has copies at its home only.
    pub(crate) fn take(&mut self, slot: Slot) {
        self.set_copies(Place::HOME, slot, Copies::default());
        self.free_if_gone(slot);
    }

    fn free_if_gone(&mut self, slot: Slot) {
        if self.blocks[slot].places == 0 {
            self.unplace(slot);
            self.free(slot);
        }
    }

    // -- names

    pub(crate) fn find(&self, name: &EngineHash<'_>) -> Option<Slot> {
        self.names.find(self.hasher.hash_one(name), |slot| self.blocks[*slot].name == *name).copied()
    }

    /// The slot of a name, a new one if it has none.
    fn slot_of(&mut self, name: &EngineHash<'_>) -> Slot {
        let Self { blocks, names, hasher, .. } = self;
        let entry = names.entry(
            hasher.hash_one(name),
            |slot| blocks[*slot].name == *name,
            |slot| hasher.hash_one(&blocks[*slot].name),
        );
        match entry {
            Entry::Occupied(found) => *found.get(),
            Entry::Vacant(vacant) => {
                let slot = blocks.take();
                vacant.insert(slot);
                blocks[slot].name = name.to_owned_hash();
                self.named += name.content().len();
                slot
            }
        }
    }

    // -- making room

    /// Key and depth of each block from a slot on, as far as it has a key; as many as there are steps for. Returns where
    /// the others begin.
    pub(crate) fn spots(&self, from: usize, steps: &mut Steps, mut each: impl FnMut(Option<(BlockKey, u32)>)) -> usize {
        let mut at = from;
        while steps.are_left()
            && let Some(block) = self.blocks.get(at)
        {
            steps.take(Steps::LOOKED_AT);
            if block.places > 0 {
                each(block.spot());
            }
            at += 1;
        }
        at
    }

    /// Drop the blocks before slot `end` that `goes` says from every place, the last ones first, as many as there are
    /// steps for. Returns how many went, and how many slots are left.
    pub(crate) fn cut(
        &mut self,
        end: usize,
        steps: &mut Steps,
        goes: impl Fn(Option<(BlockKey, u32)>) -> bool,
    ) -> (u64, usize) {
        let (mut dropped, mut left) = (0, end.min(self.blocks.len()));
        // from the last slot down: slots are used again last freed first, and a chain wants them in ascending order
        while left > 0 && steps.are_left() {
            left -= 1;
            steps.take(Steps::LOOKED_AT);
            let slot = Slot(left as u32);
            let block = &self.blocks[slot];
            if block.places > 0 && goes(block.spot()) {
                for place in (0..self.tiers.len()).map(Place) {
                    self.set_copies(place, slot, Copies::default());
                }
                self.free_if_gone(slot);
                dropped += 1;
                steps.take(Steps::DROPPED * 2 + self.tiers.len());
            }
        }
        (dropped, left)
    }

    pub(crate) fn slots(&self) -> usize {
        self.blocks.len()
    }

    /// Go on giving back what free slots take, if it is much. No slot of before is valid any more. True when all is done.
    pub(crate) fn tidy(&mut self, steps: &mut Steps) -> bool {
        self.blocks.pack_if_sparse();
        if self.blocks.is_packing() {
            while let Some((from, to)) = self.blocks.pack(steps) {
                self.note_move(from, to);
            }
            if !self.blocks.is_packing() {
                self.wide = 3 + self.side.len();
            }
        } else if self.wide > 0 {
            self.wide -= 1;
            self.shrink_table(self.wide);
        }
        self.is_tidy()
    }

    /// Is there nothing that was begun to be given back?
    pub(crate) fn is_tidy(&self) -> bool {
        !self.blocks.is_packing() && self.wide == 0
    }

    fn shrink_table(&mut self, number: usize) {
        let Self { blocks, names, keys, hasher, .. } = self;
        match number {
            0 => names.shrink_to_fit(|slot| hasher.hash_one(&blocks[*slot].name)),
            1 => keys.shrink_to_fit(|slot| hasher.hash_one(blocks[*slot].key)),
            2 => self.doubtful.shrink_to_fit(),
            side => self.side[side - 3].shrink_to_fit(),
        }
    }

    /// A block stands in another slot now.
    fn note_move(&mut self, from: Slot, to: Slot) {
        let Self { blocks, names, keys, hasher, .. } = self;
        let block = &blocks[to];
        *names.find_mut(hasher.hash_one(&block.name), |slot| *slot == from).expect("a block is found by its name") = to;
        if matches!(block.placement, Placement::Known | Placement::Guessed) {
            *keys.find_mut(hasher.hash_one(block.key), |slot| *slot == from).expect("and by its key") = to;
        }
        for place in (0..self.tiers.len()).map(Place) {
            if place != Place::HOME
                && let Some(copies) = self.side[place.0 - 1].remove(&from)
            {
                self.side[place.0 - 1].insert(to, copies);
            }
            if self.doubtful.remove(&(place, from)) {
                self.doubtful.insert((place, to));
            }
        }
    }

    fn free(&mut self, slot: Slot) {
        let block = self.blocks.free(slot);
        if let Ok(entry) = self.names.find_entry(self.hasher.hash_one(&block.name), |other| *other == slot) {
            entry.remove();
        }
        self.named -= block.name.content().len();
    }
}

#[cfg(test)]
mod tests;
