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
//!   mean that the engine hides what tells them apart: such blocks are *hidden*, until all of them are gone.
//!
//! Why it is fast: the blocks of one event get consecutive slots, so a lookup first looks at the slot after its last
//! one, which is sequential memory, and probes a table only where that fails.

use std::collections::BTreeMap;
use std::hash::BuildHasher;

use hashbrown::hash_table::Entry;
use hashbrown::{DefaultHashBuilder, HashMap, HashTable};

use crate::event::{EngineHash, Tier};
use crate::key::BlockKey;

/// The number of a slab entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Slot(u32);

impl Slot {
    fn at(self) -> usize {
        self.0 as usize
    }
}

/// The number of a place: a tier and a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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
    /// Another live hash has the same key.
    Hidden,
}

#[derive(Debug)]
struct Block {
    name: EngineHash<'static>,
    key: BlockKey,
    placement: Placement,
    /// In how many places there are copies.
    places: u32,
    /// The copies of the home place.
    home: Copies,
}

impl Block {
    fn vacant() -> Self {
        Self {
            name: EngineHash::Unsigned(0),
            key: BlockKey(0),
            placement: Placement::None,
            places: 0,
            home: Copies::default(),
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
    side: Vec<HashMap<Slot, Copies>>,
    hasher: DefaultHashBuilder,
    totals: Totals,
}

/// Sums over all blocks.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Totals {
    pub copies: u64,
    pub gpu_copies: u64,
    pub doubtful: u64,
    pub placed: u64,
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
        if place == next && place != Place::HOME {
            self.side.push(HashMap::new());
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

    fn set_copies(&mut self, place: Place, tier: Tier, slot: Slot, new: Copies) {
        let old = self.copies(place, slot);
        let block = &mut self.blocks[slot.at()];
        if place == Place::HOME {
            block.home = new;
        } else if new == Copies::default() {
            self.side[place.0 - 1].remove(&slot);
        } else {
            self.side[place.0 - 1].insert(slot, new);
        }
        block.places = block.places - u32::from(old.count() > 0) + u32::from(new.count() > 0);
        self.totals.copies = self.totals.copies - old.count() + new.count();
        if tier == Tier::Gpu {
            self.totals.gpu_copies = self.totals.gpu_copies - old.count() + new.count();
        }
        self.totals.doubtful = self.totals.doubtful - u64::from(old.doubtful()) + u64::from(new.doubtful());
    }

    // -- copies

    /// One copy more; it takes doubt away.
    pub(crate) fn add(&mut self, place: Place, tier: Tier, name: &EngineHash<'_>) -> Slot {
        let slot = self.slot_of(name);
        let copies = self.copies(place, slot);
        self.set_copies(place, tier, slot, Copies(copies.count() + 1));
        slot
    }

    /// One copy less, or `left` copies left; with `doubt` what is left of an uncounted removal is doubtful.
    ///
    /// False when the block was not known to be there.
    pub(crate) fn remove(
        &mut self,
        place: Place,
        tier: Tier,
        name: &EngineHash<'_>,
        left: Option<u32>,
        doubt: bool,
    ) -> bool {
        let Some(slot) = self.find(name) else {
            return false;
        };
        let had = self.copies(place, slot);
        if had.count() == 0 {
            return false;
        }
        let now = left.map_or(had.count() - 1, u64::from);
        let doubtful = now > 0 && (had.doubtful() || (doubt && left.is_none()));
        self.set_copies(place, tier, slot, Copies(now | if doubtful { Copies::DOUBT } else { 0 }));
        if self.blocks[slot.at()].places == 0 {
            self.unplace(slot);
            self.free(slot);
        }
        true
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

    /// The key of a block that has one.
    pub(crate) fn key(&self, slot: Slot) -> Option<BlockKey> {
        let block = &self.blocks[slot.at()];
        (block.placement != Placement::None).then_some(block.key)
    }

    /// Give a block without a key its key.
    pub(crate) fn set_key(&mut self, slot: Slot, key: BlockKey) {
        debug_assert!(self.key(slot).is_none(), "a known hash keeps its key");
        self.totals.placed += 1;
        self.blocks[slot.at()].key = key;
        self.blocks[slot.at()].placement = Placement::Hidden;
        if let Some(others) = self.hidden.get_mut(&key) {
            *others += 1;
            return;
        }
        let Self { blocks, keys, hasher, .. } = self;
        let entry = keys.entry(
            hasher.hash_one(key),
            |slot| blocks[slot.at()].key == key,
            |slot| hasher.hash_one(blocks[slot.at()].key),
        );
        match entry {
            Entry::Occupied(found) => {
                let (twin, _) = found.remove();
                blocks[twin.at()].placement = Placement::Hidden;
                self.hidden.insert(key, 2);
            }
            Entry::Vacant(vacant) => {
                vacant.insert(slot);
                blocks[slot.at()].placement = Placement::Known;
            }
        }
    }

    fn unplace(&mut self, slot: Slot) {
        let key = self.blocks[slot.at()].key;
        match self.blocks[slot.at()].placement {
            Placement::None => return,
            Placement::Known => {
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
        self.totals.placed -= 1;
    }

    /// A lookup along a chain of keys.
    pub(crate) fn walk(&self) -> Walk<'_> {
        Walk { store: self, next: 0 }
    }
}

/// Looks keys up, faster where each follows the one before.
#[derive(Debug)]
pub(crate) struct Walk<'s> {
    store: &'s Store,
    next: usize,
}

impl Walk<'_> {
    /// Does the place hold the one block of this key? Doubtful copies count with `even_doubtful`.
    pub(crate) fn held(&mut self, place: Place, key: BlockKey, even_doubtful: bool) -> bool {
        self.find(key).is_some_and(|slot| self.store.copies(place, slot).held(even_doubtful))
    }

    fn find(&mut self, key: BlockKey) -> Option<Slot> {
        let Store { blocks, keys, hasher, .. } = self.store;
        let is_it = |at: usize| blocks.get(at).is_some_and(|b| b.key == key && b.placement == Placement::Known);
        if is_it(self.next) {
            self.next += 1;
            return Some(Slot(self.next as u32 - 1));
        }
        let slot = keys.find(hasher.hash_one(key), |slot| blocks[slot.at()].key == key).copied()?;
        self.next = slot.at() + 1;
        Some(slot)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap as Model;

    use proptest::prelude::*;

    use super::*;

    impl Store {
        /// Everything that must always hold.
        fn check(&self) {
            let live = |slot: &Slot| !self.free.contains(slot);
            assert_eq!(self.names.len(), self.blocks());
            let mut totals = Totals::default();
            for (at, block) in self.blocks.iter().enumerate() {
                let slot = Slot(at as u32);
                let places: Vec<_> = self.places.iter().map(|(of, place)| (of.0, self.copies(*place, slot))).collect();
                assert_eq!(block.places as usize, places.iter().filter(|(_, copies)| copies.count() > 0).count());
                assert_eq!(live(&slot), block.places > 0, "a block lives while a place holds it");
                if !live(&slot) {
                    assert_eq!(block.placement, Placement::None);
                    continue;
                }
                assert_eq!(self.find(&block.name), Some(slot));
                for (tier, copies) in places {
                    totals.copies += copies.count();
                    totals.gpu_copies += if tier == Tier::Gpu { copies.count() } else { 0 };
                    totals.doubtful += u64::from(copies.doubtful());
                }
                totals.placed += u64::from(block.placement != Placement::None);
                let same_key = self.blocks.iter().filter(|b| b.placement != Placement::None && b.key == block.key);
                match block.placement {
                    Placement::None => {}
                    Placement::Known => {
                        assert_eq!(same_key.count(), 1);
                        assert_eq!(self.walk().find(block.key), Some(slot));
                    }
                    Placement::Hidden => {
                        assert_eq!(self.hidden[&block.key] as usize, same_key.count());
                        assert_eq!(self.walk().find(block.key), None);
                    }
                }
            }
            assert_eq!(totals, self.totals);
            assert_eq!(
                self.keys.len() + self.hidden.values().map(|n| *n as usize).sum::<usize>(),
                totals.placed as usize
            );
        }
    }

    #[derive(Debug, Clone)]
    enum Step {
        Add(usize, u64),
        Remove(usize, u64, Option<u32>, bool),
        Key(u64, u64),
    }

    const PLACES: [(Tier, i64); 4] = [(Tier::Gpu, 0), (Tier::Gpu, 1), (Tier::Cpu, 0), (Tier::Storage, -7)];

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            4 => (0..PLACES.len(), 0u64..6).prop_map(|(place, name)| Step::Add(place, name)),
            3 => (0..PLACES.len(), 0u64..6, prop::option::weighted(0.2, 0u32..3), any::<bool>())
                .prop_map(|(place, name, left, doubt)| Step::Remove(place, name, left, doubt)),
            3 => (0u64..6, 0u64..3).prop_map(|(name, key)| Step::Key(name, key)),
        ];
        prop::collection::vec(step, 0..60)
    }

    proptest! {
        #[test]
        fn equals_a_map_of_counts(steps in steps()) {
            let mut store = Store::default();
            let mut model: Model<(usize, u64), (u64, bool)> = Model::new();
            for step in steps {
                match step {
                    Step::Add(at, name) => {
                        let (tier, group) = PLACES[at];
                        let place = store.place_or_new(tier, group);
                        store.add(place, tier, &EngineHash::Unsigned(name));
                        let copies = model.entry((at, name)).or_default();
                        *copies = (copies.0 + 1, false);
                    }
                    Step::Remove(at, name, left, doubt) => {
                        let (tier, group) = PLACES[at];
                        let place = store.place_or_new(tier, group);
                        let known = store.remove(place, tier, &EngineHash::Unsigned(name), left, doubt);
                        prop_assert_eq!(known, model.contains_key(&(at, name)));
                        if let Some(copies) = model.get_mut(&(at, name)) {
                            copies.0 = left.map_or(copies.0 - 1, u64::from);
                            copies.1 |= doubt && left.is_none();
                            if copies.0 == 0 {
                                model.remove(&(at, name));
                            }
                        }
                    }
                    Step::Key(name, key) => {
                        if let Some(slot) = store.find(&EngineHash::Unsigned(name))
                            && store.key(slot).is_none()
                        {
                            store.set_key(slot, BlockKey(key));
                        }
                    }
                }
                store.check();
                for (&(at, name), &(count, doubtful)) in &model {
                    let slot = store.find(&EngineHash::Unsigned(name)).expect("it is held");
                    let place = store.place(PLACES[at].0, PLACES[at].1).expect("it was stored there");
                    let copies = store.copies(place, slot);
                    prop_assert_eq!((copies.count(), copies.doubtful()), (count, doubtful));
                }
                prop_assert_eq!(store.totals().copies, model.values().map(|copies| copies.0).sum::<u64>());
            }
        }
    }

    #[test]
    fn names_of_different_kinds_stay_apart() {
        let mut store = Store::default();
        let place = store.place_or_new(Tier::Gpu, 0);
        let names = [
            EngineHash::Unsigned(49),
            EngineHash::Unsigned(u64::MAX),
            EngineHash::Negative(-1),
            EngineHash::Bytes(b"1"[..].into()),
            EngineHash::Text("1".into()),
        ];
        for name in &names {
            store.add(place, Tier::Gpu, name);
        }
        assert_eq!(store.blocks(), names.len());
        store.check();
    }

    #[test]
    fn a_walk_follows_slots_and_falls_back_to_the_table() {
        let mut store = Store::default();
        let place = store.place_or_new(Tier::Gpu, 0);
        for name in [3, 0, 1, 2] {
            let slot = store.add(place, Tier::Gpu, &EngineHash::Unsigned(name));
            store.set_key(slot, BlockKey(100 + name));
        }
        let mut walk = store.walk();
        let found: Vec<_> = [0, 1, 2, 3, 4].map(|name| walk.held(place, BlockKey(100 + name), false)).into();
        assert_eq!(found, [true, true, true, true, false]);
    }

    #[test]
    fn slots_are_used_again() {
        let mut store = Store::default();
        let place = store.place_or_new(Tier::Gpu, 0);
        for name in 0..10_000u64 {
            store.add(place, Tier::Gpu, &EngineHash::Unsigned(name));
            if name >= 10 {
                assert!(store.remove(place, Tier::Gpu, &EngineHash::Unsigned(name - 10), None, false));
            }
        }
        assert!(store.blocks.len() <= 11);
    }
}
