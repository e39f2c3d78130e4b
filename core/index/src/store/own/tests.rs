//! The store against a map of counts, and all that must always hold after every step.

use std::collections::HashMap as Model;
use std::collections::HashSet;

use proptest::prelude::*;

use super::*;

impl Own {
    /// Everything that must always hold.
    fn check(&self) {
        self.blocks.check();
        assert_eq!(self.names.len(), self.blocks());
        let mut totals = Totals::default();
        for slot in (0..self.blocks.len()).map(|at| Slot(at as u32)) {
            let block = &self.blocks[slot];
            let places: Vec<_> = self.places.iter().map(|(of, place)| (of.0, self.copies(*place, slot))).collect();
            assert_eq!(block.places as usize, places.iter().filter(|(_, copies)| copies.count() > 0).count());
            if block.places == 0 {
                assert!(block.placement == Placement::None);
                continue;
            }
            assert_eq!(self.find(&block.name), Some(slot));
            for (tier, copies) in places {
                totals.copies += copies.count();
                totals.gpu_copies += if tier == Tier::Gpu { copies.count() } else { 0 };
            }
            totals.placed += u64::from(block.placement != Placement::None);
            totals.guessed += u64::from(block.placement == Placement::Guessed);
            let same_key =
                self.blocks.iter().map(|(_, b)| b).filter(|b| b.placement != Placement::None && b.key == block.key);
            match block.placement {
                Placement::None => {}
                Placement::Known | Placement::Guessed => {
                    assert_eq!(same_key.count(), 1);
                    assert_eq!(self.walk().find(block.key), Some(slot));
                }
                Placement::Hidden => {
                    assert_eq!(self.hidden[&block.key] as usize, same_key.count());
                    assert!(self.walk().find(block.key).is_none());
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
    Key(u64, Spot),
    Confirm(usize, u64),
    Miss(u64),
    DropDoubtful,
    Cut(u32),
    Tidy(usize),
}

const PLACES: [(Tier, i64); 4] = [(Tier::Gpu, 0), (Tier::Gpu, 1), (Tier::Cpu, 0), (Tier::Storage, -7)];

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => (0..PLACES.len(), 0u64..10).prop_map(|(place, name)| Step::Add(place, name)),
        3 => (0..PLACES.len(), 0u64..10, prop::option::weighted(0.2, 0u32..3), any::<bool>())
            .prop_map(|(place, name, left, doubt)| Step::Remove(place, name, left, doubt)),
        3 => (0u64..10, 0u64..4, any::<bool>()).prop_map(|(name, key, guessed)| Step::Key(name, spot(key, guessed))),
        1 => (0..PLACES.len(), 0u64..4).prop_map(|(place, key)| Step::Confirm(place, key)),
        1 => (0u64..4).prop_map(Step::Miss),
        1 => Just(Step::DropDoubtful),
        1 => (0u32..3).prop_map(Step::Cut),
        3 => (1usize..12).prop_map(Step::Tidy),
    ];
    prop::collection::vec(step, 0..150)
}

/// What a store holds: copies by place and name, keys by name.
#[derive(Default)]
struct Plain {
    copies: Model<(usize, u64), (u64, bool)>,
    spots: Model<u64, Spot>,
    /// Keys that two blocks had at once, one of which at least is left.
    hidden: HashSet<u64>,
}

impl Plain {
    fn names(&self) -> HashSet<u64> {
        self.copies.keys().map(|(_, name)| *name).collect()
    }

    /// The one block that has this key.
    fn only(&self, key: u64) -> Option<u64> {
        let names: Vec<_> = self.spots.iter().filter(|(_, spot)| spot.key.0 == key).map(|(name, _)| *name).collect();
        (names.len() == 1 && !self.hidden.contains(&key)).then(|| names[0])
    }

    /// Names that no place holds are forgotten.
    fn forget_the_gone(&mut self) {
        let names = self.names();
        self.spots.retain(|name, _| names.contains(name));
        let of_key = |key: u64| self.spots.values().filter(|spot| spot.key.0 == key).count();
        self.hidden.retain(|key| of_key(*key) > 0);
        self.hidden.extend((0..4).filter(|key| of_key(*key) > 1));
    }
}

/// Two keys of each depth.
fn spot(key: u64, guessed: bool) -> Spot {
    Spot { key: BlockKey(key), depth: key as u32 / 2, guessed }
}

proptest! {
    #[test]
    fn equals_a_map_of_counts(steps in steps()) {
        let mut store = Own::default();
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
                Step::Key(name, spot) => {
                    if let Some(slot) = store.find(&EngineHash::Unsigned(name))
                        && store.spot(slot).is_none()
                    {
                        store.set_spot(slot, spot);
                        plain.spots.retain(|_, other| other.key != spot.key || !other.guessed || spot.guessed);
                        if !spot.guessed || plain.spots.values().all(|other| other.key != spot.key) {
                            plain.spots.insert(name, spot);
                        }
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
                        let all = plain.spots[&only].guessed;
                        plain.copies.retain(|(_, name), (_, doubtful)| *name != only || !(*doubtful || all));
                    }
                    prop_assert_eq!(store.drop_expected(BlockKey(key)), (before - plain.copies.len()) as u64);
                }
                Step::DropDoubtful => {
                    let before = plain.copies.len();
                    plain.copies.retain(|_, (_, doubtful)| !*doubtful);
                    prop_assert_eq!(store.drop_doubtful(), (before - plain.copies.len()) as u64);
                }
                Step::Cut(depth) => {
                    let goes = |spot: Option<(BlockKey, u32)>| spot.is_none_or(|(_, at)| at >= depth);
                    let gone: HashSet<_> = plain.names().into_iter().filter(|name| {
                        goes(plain.spots.get(name).map(|spot| (spot.key, spot.depth)))
                    }).collect();
                    plain.copies.retain(|(_, name), _| !gone.contains(name));
                    prop_assert_eq!(store.cut(usize::MAX, &mut Steps::new(usize::MAX), goes), (gone.len() as u64, 0));
                }
                Step::Tidy(steps) => _ = store.tidy(&mut Steps::new(steps)),
            }
            plain.forget_the_gone();
            let model = &plain.copies;
            store.check();
            prop_assert_eq!(store.blocks(), plain.names().len());
            for (&(at, name), &(count, doubtful)) in model {
                let slot = store.find(&EngineHash::Unsigned(name)).expect("it is held");
                let copies = store.copies(places[at], slot);
                prop_assert_eq!(store.spot(slot), plain.spots.get(&name).copied());
                prop_assert_eq!((copies.count(), copies.doubtful()), (count, doubtful));
            }
            prop_assert_eq!(store.totals().copies, model.values().map(|copies| copies.0).sum::<u64>());
        }
    }
}

#[test]
fn names_of_different_kinds_stay_apart() {
    let mut store = Own::default();
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
    let mut store = Own::default();
    let place = store.place_or_new(Tier::Gpu, 0);
    for name in [3, 0, 1, 2] {
        let slot = store.add(place, &EngineHash::Unsigned(name));
        store.set_spot(slot, spot(100 + name, false));
    }
    let mut walk = store.walk();
    let found: Vec<_> = [0, 1, 2, 3, 4].map(|name| walk.held(place, BlockKey(100 + name), false)).into();
    assert_eq!(found, [true, true, true, true, false]);
}

#[test]
fn slots_are_used_again() {
    let mut store = Own::default();
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
fn memory_is_given_back() {
    let mut store = Own::default();
    let place = store.place_or_new(Tier::Gpu, 0);
    let offload = store.place_or_new(Tier::Cpu, 0);
    for name in 0..10_000u64 {
        let slot = store.add(place, &EngineHash::Unsigned(name));
        store.add(offload, &EngineHash::Unsigned(name));
        store.set_spot(slot, Spot { key: BlockKey(name), depth: name as u32, guessed: name == 9_905 });
    }
    let doubtful = store.add(offload, &EngineHash::Unsigned(9_950));
    assert!(store.remove(offload, doubtful, None, true));
    let goes = |spot: Option<(BlockKey, u32)>| spot.is_some_and(|(_, depth)| depth < 9_900);
    assert_eq!(store.cut(usize::MAX, &mut Steps::new(usize::MAX), goes), (9900, 0));
    let (full, mut pieces) = (store.bytes(), 0);
    while !store.tidy(&mut Steps::new(1000)) {
        pieces += 1;
    }
    assert!(
        (26..=34).contains(&pieces),
        "slots are looked at, a hundred moved, the others given back, then tables: {pieces}"
    );
    assert_eq!(store.blocks.len(), 100);
    assert!(store.bytes() < full / 50, "{} of {full} bytes", store.bytes());
    store.check();
    assert!(store.walk().held(offload, BlockKey(9_999), false) && !store.walk().held(place, BlockKey(100), false));
    assert_eq!([false, true].map(|even| store.walk().held(offload, BlockKey(9_950), even)), [false, true]);
}
