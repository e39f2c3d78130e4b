//! The store against a map of counts, and all that must always hold after every step.

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
        assert_eq!(self.keys.len() + self.hidden.values().map(|n| *n as usize).sum::<usize>(), totals.placed as usize);
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
