//! The store against a map of counts, and all that must always hold after every step.

use std::collections::HashMap as Model;
use std::collections::{BTreeMap, HashSet};

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
            assert!(live(&slot) || !self.via.contains_key(&slot));
            assert_eq!(live(&slot), block.places > 0, "a block lives while a place holds it");
            if !live(&slot) {
                assert!(block.placement == Placement::None && !block.is_read());
                continue;
            }
            assert_eq!(self.find(&block.name), Some(slot));
            for (tier, copies) in places {
                totals.copies += copies.count();
                totals.gpu_copies += if tier == Tier::Gpu { copies.count() } else { 0 };
            }
            totals.placed += u64::from(block.placement != Placement::None);
            let same_key = self.blocks.iter().filter(|b| b.placement != Placement::None && b.key == block.key);
            match block.placement {
                Placement::None => {}
                Placement::Known => {
                    assert_eq!(same_key.count(), 1);
                    assert_eq!(self.walk(false).find(block.key).map(|(slot, _)| slot), Some(slot));
                }
                Placement::Hidden => {
                    assert_eq!(self.hidden[&block.key] as usize, same_key.count());
                    assert!(self.walk(false).find(block.key).is_none());
                }
            }
        }
        assert_eq!(totals, self.totals);
        self.check_doubtful();
        assert_eq!(self.keys.len() + self.hidden.values().map(|n| *n as usize).sum::<usize>(), totals.placed as usize);
    }
}

#[derive(Debug, Clone)]
enum Step {
    Add(usize, u64),
    Remove(usize, u64, Option<u32>, bool),
    Key(u64, u64),
    Confirm(usize, u64),
    Miss(u64),
    DropDoubtful,
    Read(u64),
    Cut(u64),
}

const PLACES: [(Tier, i64); 4] = [(Tier::Gpu, 0), (Tier::Gpu, 1), (Tier::Cpu, 0), (Tier::Storage, -7)];

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => (0..PLACES.len(), 0u64..6).prop_map(|(place, name)| Step::Add(place, name)),
        3 => (0..PLACES.len(), 0u64..6, prop::option::weighted(0.2, 0u32..3), any::<bool>())
            .prop_map(|(place, name, left, doubt)| Step::Remove(place, name, left, doubt)),
        3 => (0u64..6, 0u64..4).prop_map(|(name, key)| Step::Key(name, key)),
        1 => (0..PLACES.len(), 0u64..4).prop_map(|(place, key)| Step::Confirm(place, key)),
        1 => (0u64..4).prop_map(Step::Miss),
        1 => Just(Step::DropDoubtful),
        1 => (0u64..4).prop_map(Step::Read),
        1 => (0u64..6).prop_map(Step::Cut),
    ];
    prop::collection::vec(step, 0..60)
}

/// What a store holds: copies by place and name, keys by name, and the names that were read.
#[derive(Default)]
struct Plain {
    copies: Model<(usize, u64), (u64, bool)>,
    keys: Model<u64, u64>,
    read: HashSet<u64>,
}

impl Plain {
    fn names(&self) -> HashSet<u64> {
        self.copies.keys().map(|(_, name)| *name).collect()
    }

    /// The one block that has this key.
    fn only(&self, key: u64) -> Option<u64> {
        let names: Vec<_> = self.keys.iter().filter(|(_, other)| **other == key).map(|(name, _)| *name).collect();
        (names.len() == 1).then(|| names[0])
    }

    /// Names that no place holds are forgotten.
    fn forget_the_gone(&mut self) {
        let names = self.names();
        self.keys.retain(|name, _| names.contains(name));
        self.read.retain(|name| names.contains(name));
    }

    /// 0 without a key, then not read and read, deepest first.
    fn class(&self, name: u64) -> (u8, i64) {
        let read = 1 + u8::from(self.read.contains(&name));
        self.keys.get(&name).map_or((0, 0), |key| (read, -i64::from(depth(*key))))
    }
}

/// Two keys of each depth; those of depth 1 hang on a name.
fn depth(key: u64) -> u32 {
    key as u32 / 2
}

fn spot(key: u64) -> Spot {
    Spot { key: BlockKey(key), depth: depth(key), via: (depth(key) == 1).then_some(BlockKey(77)) }
}

proptest! {
    #[test]
    fn equals_a_map_of_counts(steps in steps()) {
        let mut store = Store::default();
        let places: Vec<_> = PLACES.iter().map(|(tier, group)| store.place_or_new(*tier, *group)).collect();
        let mut plain = Plain::default();
        for step in steps {
            match step {
                Step::Add(at, name) => {
                    store.add(places[at], &EngineHash::Unsigned(name));
                    let copies = plain.copies.entry((at, name)).or_default();
                    *copies = (copies.0 + 1, false);
                }
                Step::Remove(at, name, left, doubt) => {
                    let slot = store.find(&EngineHash::Unsigned(name));
                    let known = slot.is_some_and(|slot| store.remove(places[at], slot, left, doubt));
                    prop_assert_eq!(known, plain.copies.contains_key(&(at, name)));
                    if let Some(copies) = plain.copies.get_mut(&(at, name)) {
                        copies.0 = left.map_or(copies.0 - 1, u64::from);
                        copies.1 |= doubt && left.is_none();
                        if copies.0 == 0 {
                            plain.copies.remove(&(at, name));
                        }
                    }
                }
                Step::Key(name, key) => {
                    if let Some(slot) = store.find(&EngineHash::Unsigned(name))
                        && store.spot(slot).is_none()
                    {
                        store.set_spot(slot, spot(key));
                        plain.keys.insert(name, key);
                    }
                }
                Step::Confirm(at, key) => {
                    store.confirm(places[at], BlockKey(key));
                    if let Some(name) = plain.only(key) {
                        let other = |to: usize| PLACES[to].0 != PLACES[at].0 && plain.copies.contains_key(&(to, name));
                        if !(0..PLACES.len()).any(other) {
                            plain.copies.entry((at, name)).and_modify(|copies| copies.1 = false);
                        }
                    }
                }
                Step::Miss(key) => {
                    let before = plain.copies.len();
                    if let Some(only) = plain.only(key) {
                        plain.copies.retain(|(_, name), (_, doubtful)| *name != only || !*doubtful);
                    }
                    prop_assert_eq!(store.drop_doubtful_of(BlockKey(key)), (before - plain.copies.len()) as u64);
                }
                Step::DropDoubtful => {
                    let before = plain.copies.len();
                    plain.copies.retain(|_, (_, doubtful)| !*doubtful);
                    prop_assert_eq!(store.drop_doubtful(), (before - plain.copies.len()) as u64);
                }
                Step::Read(key) => {
                    store.walk(false).note_read(BlockKey(key));
                    plain.read.extend(plain.only(key));
                }
                Step::Cut(target) => {
                    let mut classes: BTreeMap<_, HashSet<u64>> = BTreeMap::new();
                    for name in plain.names() {
                        classes.entry(plain.class(name)).or_default().insert(name);
                    }
                    while plain.names().len() as u64 > target
                        && let Some((_, gone)) = classes.pop_first()
                    {
                        plain.copies.retain(|(_, name), _| !gone.contains(name));
                    }
                    plain.read.clear();
                    let mut census = Census::default();
                    store.census(&mut census);
                    store.cut(&census.plan(target));
                }
            }
            plain.forget_the_gone();
            let model = &plain.copies;
            store.check();
            prop_assert_eq!(store.blocks(), plain.names().len());
            for (&(at, name), &(count, doubtful)) in model {
                let slot = store.find(&EngineHash::Unsigned(name)).expect("it is held");
                let copies = store.copies(places[at], slot);
                prop_assert_eq!(store.spot(slot), plain.keys.get(&name).map(|key| spot(*key)));
                prop_assert_eq!(store.blocks[slot.at()].is_read(), plain.read.contains(&name));
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
        store.add(place, name);
    }
    assert_eq!(store.blocks(), names.len());
    store.check();
}

#[test]
fn a_walk_follows_slots_and_falls_back_to_the_table() {
    let mut store = Store::default();
    let place = store.place_or_new(Tier::Gpu, 0);
    for name in [3, 0, 1, 2] {
        let slot = store.add(place, &EngineHash::Unsigned(name));
        store.set_spot(slot, spot(100 + name));
    }
    let mut walk = store.walk(false);
    let found: Vec<_> = [0, 1, 2, 3, 4].map(|name| walk.held(place, BlockKey(100 + name), false)).into();
    assert_eq!(found, [true, true, true, true, false]);
}

#[test]
fn slots_are_used_again() {
    let mut store = Store::default();
    let place = store.place_or_new(Tier::Gpu, 0);
    for name in 0..10_000u64 {
        store.add(place, &EngineHash::Unsigned(name));
        if name >= 10 {
            let slot = store.find(&EngineHash::Unsigned(name - 10)).expect("it was added");
            assert!(store.remove(place, slot, None, false));
        }
    }
    assert!(store.blocks.len() <= 11);
}

#[test]
fn a_cut_gives_memory_back() {
    let mut store = Store::default();
    let place = store.place_or_new(Tier::Gpu, 0);
    let offload = store.place_or_new(Tier::Cpu, 0);
    for name in 0..1000u64 {
        let slot = store.add(place, &EngineHash::Unsigned(name));
        store.add(offload, &EngineHash::Unsigned(name));
        store.set_spot(slot, Spot { key: BlockKey(name), depth: name as u32, via: None });
    }
    let mut census = Census::default();
    store.census(&mut census);
    assert_eq!(store.cut(&census.plan(100)), 900);
    assert_eq!((store.blocks.len(), store.blocks.capacity()), (100, 100));
    store.check();
    assert!(
        store.walk(false).held(offload, BlockKey(99), false) && !store.walk(false).held(place, BlockKey(100), false)
    );
}

#[test]
fn a_block_takes_no_more_memory_for_what_the_cut_wants_to_know() {
    assert_eq!(size_of::<Block>(), size_of::<EngineHash<'static>>() + 24);
}
