//! Which blocks one worker holds: names, copies, keys.
//!
//! One slab entry per distinct block; two hash tables find it, by engine hash and by block key, and hold nothing but
//! slot numbers. A block lives while any place (tier and group) holds a copy of it. The copies of the first place that
//! the worker speaks of, its *home*, stand in the slab itself; those of other places in side tables.
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

mod cut;
mod doubt;
mod keys;

use std::collections::BTreeMap;
use std::hash::BuildHasher;
use std::sync::atomic::{AtomicBool, Ordering};

use hashbrown::hash_table::Entry;
use hashbrown::{DefaultHashBuilder, HashMap, HashSet, HashTable};

use crate::event::{EngineHash, Tier};
use crate::key::BlockKey;

pub(crate) use cut::{Census, Cut};
pub(crate) use keys::Spot;

/// The number of a slab entry.
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
    const HOME: Self = Self(0);
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
    /// Since the last sweep a lookup found it.
    read: AtomicBool,
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
            read: AtomicBool::new(false),
        }
    }

    fn is_read(&self) -> bool {
        self.read.load(Ordering::Relaxed)
    }

    fn note_read(&self) {
        // most are noted already, and a write would cost every reader its cache line
        if !self.is_read() {
            self.read.store(true, Ordering::Relaxed);
        }
    }
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Store {
    blocks: Vec<Block>,
    free: Vec<Slot>,
    names: HashTable<Slot>,
    keys: HashTable<Slot>,
    hidden: HashMap<BlockKey, u32>,
    places: BTreeMap<(Tier, i64), Place>,
    /// By number of place.
    tiers: Vec<Tier>,
    side: Vec<HashMap<Slot, Copies>>,
    doubtful: HashSet<(Place, Slot)>,
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

impl Store {
    pub(crate) fn totals(&self) -> Totals {
        self.totals
    }

    /// Distinct blocks.
    pub(crate) fn blocks(&self) -> usize {
        self.blocks.len() - self.free.len()
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
            self.blocks[slot.at()].home
        } else {
            self.side[place.0 - 1].get(&slot).copied().unwrap_or_default()
        }
    }

    fn set_copies(&mut self, place: Place, slot: Slot, new: Copies) {
        let old = self.copies(place, slot);
        let block = &mut self.blocks[slot.at()];
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

    fn free_if_gone(&mut self, slot: Slot) {
        if self.blocks[slot.at()].places == 0 {
            self.unplace(slot);
            self.free(slot);
        }
    }

    // -- names

    pub(crate) fn find(&self, name: &EngineHash<'_>) -> Option<Slot> {
        self.names.find(self.hasher.hash_one(name), |slot| self.blocks[slot.at()].name == *name).copied()
    }

    /// The slot of a name, a new one if it has none.
    fn slot_of(&mut self, name: &EngineHash<'_>) -> Slot {
        let Self { blocks, free, names, hasher, .. } = self;
        let entry = names.entry(
            hasher.hash_one(name),
            |slot| blocks[slot.at()].name == *name,
            |slot| hasher.hash_one(&blocks[slot.at()].name),
        );
        match entry {
            Entry::Occupied(found) => *found.get(),
            Entry::Vacant(vacant) => {
                let slot = free.last().copied().unwrap_or_else(|| {
                    // 2³² blocks of one worker are more than any memory holds
                    Slot(u32::try_from(blocks.len()).expect("fewer than 2^32 blocks"))
                });
                vacant.insert(slot);
                if free.pop().is_none() {
                    blocks.push(Block::vacant());
                }
                blocks[slot.at()].name = name.to_owned_hash();
                slot
            }
        }
    }

    fn free(&mut self, slot: Slot) {
        let block = std::mem::replace(&mut self.blocks[slot.at()], Block::vacant());
        if let Ok(entry) = self.names.find_entry(self.hasher.hash_one(&block.name), |other| *other == slot) {
            entry.remove();
        }
        self.free.push(slot);
    }
}

#[cfg(test)]
mod tests;
