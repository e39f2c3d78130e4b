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

use std::collections::BTreeMap;
use std::hash::BuildHasher;
use std::sync::atomic::{AtomicBool, Ordering};

use hashbrown::hash_table::Entry;
use hashbrown::{DefaultHashBuilder, HashMap, HashSet, HashTable};

use crate::event::{EngineHash, Tier};
use crate::key::BlockKey;

pub(crate) use cut::{Census, Cut};

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

    // -- keys

    /// Where a block stands that has a key.
    pub(crate) fn spot(&self, slot: Slot) -> Option<Spot> {
        let block = &self.blocks[slot.at()];
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
    fn find_key(&self, key: BlockKey) -> Option<Slot> {
        self.keys.find(self.hasher.hash_one(key), |slot| self.blocks[slot.at()].key == key).copied()
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
                |slot| blocks[slot.at()].key == key,
                |slot| hasher.hash_one(blocks[slot.at()].key),
            );
            match entry {
                Entry::Occupied(_) if guessed => return,
                Entry::Occupied(mut found) if blocks[found.get().at()].placement == Placement::Guessed => {
                    let guess = std::mem::replace(found.get_mut(), slot);
                    self.forget_placement(guess);
                    Placement::Known
                }
                Entry::Occupied(found) => {
                    let (twin, _) = found.remove();
                    blocks[twin.at()].placement = Placement::Hidden;
                    self.hidden.insert(key, 2);
                    Placement::Hidden
                }
                Entry::Vacant(vacant) => {
                    vacant.insert(slot);
                    if guessed { Placement::Guessed } else { Placement::Known }
                }
            }
        };
        let block = &mut self.blocks[slot.at()];
        (block.key, block.depth, block.placement) = (key, depth, placement);
        self.totals.placed += 1;
        self.totals.guessed += u64::from(guessed);
    }

    /// Take a block's key away, if it has one.
    fn unplace(&mut self, slot: Slot) {
        let key = self.blocks[slot.at()].key;
        match self.blocks[slot.at()].placement {
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
        let block = &mut self.blocks[slot.at()];
        self.totals.placed -= 1;
        self.totals.guessed -= u64::from(block.placement == Placement::Guessed);
        block.placement = Placement::None;
        *block.read.get_mut() = false;
    }

    /// A lookup along a chain of keys; with `note_reads` what it finds held is read from then on.
    pub(crate) fn walk(&self, note_reads: bool) -> Walk<'_> {
        Walk { store: self, next: 0, note_reads }
    }
}

/// Looks keys up, faster where each follows the one before.
#[derive(Debug)]
pub(crate) struct Walk<'s> {
    store: &'s Store,
    next: usize,
    note_reads: bool,
}

impl<'s> Walk<'s> {
    /// Does the place hold the one block of this key? Doubtful copies and guessed blocks count with `even_doubtful`.
    #[inline]
    pub(crate) fn held(&mut self, place: Place, key: BlockKey, even_doubtful: bool) -> bool {
        self.find(key).is_some_and(|(slot, block)| {
            let copies = if place == Place::HOME { block.home } else { self.store.copies(place, slot) };
            let held = copies.held(even_doubtful) && (even_doubtful || block.placement != Placement::Guessed);
            if self.note_reads && held {
                block.note_read();
            }
            held
        })
    }

    /// A lookup found the one block of this key, wherever it is.
    pub(crate) fn note_read(&mut self, key: BlockKey) {
        if let Some((_, block)) = self.find(key) {
            block.note_read();
        }
    }

    #[inline]
    fn find(&mut self, key: BlockKey) -> Option<(Slot, &'s Block)> {
        let at = self.next;
        match self.store.blocks.get(at) {
            Some(block) if block.key == key && block.placement == Placement::Known => {
                self.next += 1;
                Some((Slot(at as u32), block))
            }
            _ => self.probe(key),
        }
    }

    #[cold]
    fn probe(&mut self, key: BlockKey) -> Option<(Slot, &'s Block)> {
        let slot = self.store.find_key(key)?;
        self.next = slot.at() + 1;
        Some((slot, &self.store.blocks[slot.at()]))
    }
}

#[cfg(test)]
mod tests;
