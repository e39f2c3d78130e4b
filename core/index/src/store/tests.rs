//! Several workers' stores over one shared store, against what each of them was told, and all that must always hold.

use std::collections::{BTreeMap, HashSet};

use proptest::prelude::*;

use super::*;
use crate::steps::Steps;

const WORKERS: usize = 3;
const PLACES: [(Tier, i64); 3] = [(Tier::Gpu, 0), (Tier::Gpu, 1), (Tier::Cpu, 0)];

#[derive(Debug, Clone)]
enum Step {
    /// A store of one block: worker, place, name, key.
    Store(usize, usize, u64, u64),
    /// Of a name that is no number.
    StoreText(usize, u64),
    /// A store that says nothing of the block's place in a chain.
    Unplaced(usize, usize, u64),
    Remove(usize, usize, u64, Option<u32>, bool),
    Guess(usize, u64, u64),
    DropDoubtful(usize),
    Empty(usize),
    Sweep(usize),
    Read(u64),
    /// In pieces of so many steps.
    Cut(u64, usize),
}

fn pieces() -> impl Strategy<Value = usize> {
    prop_oneof![Just(1), 1..400usize]
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let worker = || 0..WORKERS;
    let place = || prop_oneof![4 => Just(0), 1 => 1..PLACES.len()];
    let step = prop_oneof![
        12 => (worker(), place(), 0u64..8, 0u64..6).prop_map(|(w, p, name, key)| Step::Store(w, p, name, key)),
        1 => (worker(), 0u64..6).prop_map(|(w, key)| Step::StoreText(w, key)),
        2 => (worker(), place(), 0u64..8).prop_map(|(w, p, name)| Step::Unplaced(w, p, name)),
        8 => (worker(), place(), 0u64..8, prop::option::weighted(0.2, 0u32..3), any::<bool>())
            .prop_map(|(w, p, name, left, doubt)| Step::Remove(w, p, name, left, doubt)),
        1 => (worker(), 0u64..8, 0u64..6).prop_map(|(w, name, key)| Step::Guess(w, name, key)),
        1 => worker().prop_map(Step::DropDoubtful),
        1 => worker().prop_map(Step::Empty),
        2 => (0usize..6).prop_map(Step::Sweep),
        2 => (0u64..6).prop_map(Step::Read),
        1 => (0u64..12, pieces()).prop_map(|(target, steps)| Step::Cut(target, steps)),
    ];
    prop::collection::vec(step, 0..80)
}

/// Two keys of each depth.
fn spot(key: u64, guessed: bool) -> Spot {
    Spot { key: BlockKey(key + 1000), depth: key as u32 / 2, guessed }
}

/// What one worker was told: copies by name and place, and where names stand.
#[derive(Default)]
struct Told {
    copies: BTreeMap<(String, usize), (u64, bool)>,
    spots: BTreeMap<String, Spot>,
}

impl Told {
    fn names(&self) -> HashSet<String> {
        self.copies.keys().map(|(name, _)| name.clone()).collect()
    }

    fn add(&mut self, name: &str, place: usize) {
        let copies = self.copies.entry((name.to_owned(), place)).or_default();
        *copies = (copies.0 + 1, false);
    }

    fn place(&mut self, name: &str, spot: Spot) {
        if self.spots.contains_key(name) {
            return;
        }
        self.spots.retain(|_, other| other.key != spot.key || !other.guessed || spot.guessed);
        if !spot.guessed || self.spots.values().all(|other| other.key != spot.key) {
            self.spots.insert(name.to_owned(), spot);
        }
    }

    fn forget_the_gone(&mut self) {
        let names = self.names();
        self.spots.retain(|name, _| names.contains(name));
    }

    /// One copy at home, a key that is certain, and never another block of that key since it came.
    fn could_be_plain(&self, name: &str) -> bool {
        let copies: Vec<_> = self.copies.iter().filter(|((of, _), _)| of == name).collect();
        let (Some(spot), [((_, 0), (1, false))]) = (self.spots.get(name), copies.as_slice()) else {
            return false;
        };
        !spot.guessed
    }
}

fn hash(name: &str) -> EngineHash<'static> {
    name.parse().map_or_else(|_| EngineHash::Text(name.to_owned().into()), EngineHash::Unsigned)
}

/// Each as if an event had spoken of it.
fn name_places(store: &mut Store) {
    for (tier, group) in PLACES {
        store.place_or_new(tier, group);
    }
}

/// Where a cut that is made in pieces goes on.
#[derive(Debug, Clone, Copy)]
enum Piece {
    OfStore(usize, Rest),
    OfShared(shared::Walk),
}

impl Piece {
    fn of_store(at: usize) -> Self {
        if at < WORKERS { Self::OfStore(at, Rest::ALL) } else { Self::OfShared(shared::Walk::START) }
    }
}

/// Workers, what each was told, and which keys were read.
struct World {
    shared: Shared,
    stores: Vec<Store>,
    told: Vec<Told>,
    read: HashSet<BlockKey>,
    places: Vec<Place>,
}

impl World {
    fn new() -> Self {
        let mut stores: Vec<_> = (0..WORKERS).map(|_| Store::default()).collect();
        stores.iter_mut().for_each(name_places);
        let places = PLACES.iter().map(|(tier, group)| stores[0].place(*tier, *group).expect("named")).collect();
        let told = (0..WORKERS).map(|_| Told::default()).collect();
        Self { shared: Shared::default(), stores, told, read: HashSet::new(), places }
    }

    fn take(&mut self, step: Step) -> Result<(), TestCaseError> {
        let Self { shared, stores, told, read, places } = self;
        match step {
            Step::Store(at, place, name, key) => {
                let name = name.to_string();
                let stands = stores[at]
                    .add_at(shared, places[place], &hash(&name), || Some(spot(key, false)), None)
                    .map(|(spot, _)| spot);
                told[at].add(&name, place);
                told[at].place(&name, spot(key, false));
                prop_assert_eq!(stands, told[at].spots.get(&name).copied());
            }
            Step::StoreText(at, key) => {
                stores[at].add_at(shared, places[0], &hash("text"), || Some(spot(key, false)), None);
                told[at].add("text", 0);
                told[at].place("text", spot(key, false));
            }
            Step::Unplaced(at, place, name) => {
                stores[at].add(shared, places[place], &EngineHash::Unsigned(name));
                told[at].add(&name.to_string(), place);
            }
            Step::Remove(at, place, name, left, doubt) => {
                let hash = EngineHash::Unsigned(name);
                let known = stores[at]
                    .find(shared, &hash)
                    .is_some_and(|block| stores[at].remove(shared, &[places[place]], (&hash, block), left, doubt));
                let copies = told[at].copies.get_mut(&(name.to_string(), place));
                prop_assert_eq!(known, copies.is_some());
                if let Some(copies) = copies {
                    copies.0 = left.map_or(copies.0 - 1, u64::from);
                    copies.1 |= doubt && left.is_none();
                    if copies.0 == 0 {
                        told[at].copies.remove(&(name.to_string(), place));
                    }
                }
            }
            Step::Guess(at, name, key) => {
                stores[at].spot_at(shared, &EngineHash::Unsigned(name), || Some(spot(key, true)));
                if told[at].names().contains(&name.to_string()) {
                    told[at].place(&name.to_string(), spot(key, true));
                }
            }
            Step::DropDoubtful(at) => {
                stores[at].drop_doubtful(shared);
                told[at].copies.retain(|_, (_, doubtful)| !*doubtful);
            }
            Step::Empty(at) => {
                drop(stores[at].empty(shared));
                name_places(&mut stores[at]);
                told[at] = Told::default();
            }
            Step::Sweep(steps) => shared.sweep(Steps::new(steps)),
            Step::Read(key) => {
                let key = spot(key, false).key;
                if told.iter().any(|told| told.spots.values().any(|spot| spot.key == key)) {
                    shared.note_read(shared.keyed(key, None).expect("somebody holds it"));
                    read.insert(key);
                }
            }
            Step::Cut(target, steps) => self.cut(target, steps)?,
        }
        self.tidy();
        Ok(())
    }

    fn tidy(&mut self) {
        self.told.iter_mut().for_each(Told::forget_the_gone);
        self.stores.iter_mut().for_each(|store| _ = store.tidy(&mut Steps::new(3)));
        let read = std::mem::take(&mut self.read);
        self.read = read.into_iter().filter(|key| self.is_held(*key)).collect();
    }

    fn is_held(&self, key: BlockKey) -> bool {
        self.told.iter().any(|told| told.spots.values().any(|spot| spot.key == key))
    }

    fn census(&self, steps: usize) -> Census {
        let mut census = Census::default();
        let mut walk = shared::Walk::START;
        while !walk.is_over() {
            self.shared.census(&mut census, &mut walk, &mut Steps::new(steps));
        }
        for store in &self.stores {
            let mut rest = Some(0);
            while let Some(from) = rest {
                rest = store.census(&self.shared, &mut census, from, &mut Steps::new(steps));
            }
        }
        census
    }

    /// Whole classes, those that are worth least first.
    fn cut(&mut self, target: u64, steps: usize) -> Result<(), TestCaseError> {
        let cut = self.census(steps).plan(target);
        let mut piece = Some(Piece::of_store(0));
        while let Some(one) = piece {
            piece = self.cut_piece(&cut, one, steps).1;
        }
        let mut classes: BTreeMap<(u8, i64), Vec<(usize, String)>> = BTreeMap::new();
        for (at, told) in self.told.iter().enumerate() {
            for name in told.names() {
                let class = told
                    .spots
                    .get(&name)
                    .map_or((0, 0), |spot| (1 + u8::from(self.read.contains(&spot.key)), -i64::from(spot.depth)));
                classes.entry(class).or_default().push((at, name));
            }
        }
        let mut blocks: usize = self.told.iter().map(|told| told.names().len()).sum();
        while blocks as u64 > target
            && let Some((_, gone)) = classes.pop_first()
        {
            blocks -= gone.len();
            for (at, name) in gone {
                self.told[at].copies.retain(|(of, _), _| *of != name);
            }
        }
        self.read.clear();
        Ok(())
    }

    /// Returns how many blocks went, by worker.
    fn cut_piece(&mut self, cut: &Cut, piece: Piece, steps: usize) -> ([u64; WORKERS], Option<Piece>) {
        let mut steps = Steps::new(steps);
        let mut gone = [0; WORKERS];
        let next = match piece {
            Piece::OfStore(at, rest) => {
                let (dropped, rest) = self.stores[at].cut(&mut self.shared, cut, rest, &mut steps);
                gone[at] = dropped;
                Some(rest.map_or_else(|| Piece::of_store(at + 1), |rest| Piece::OfStore(at, rest)))
            }
            Piece::OfShared(mut walk) => {
                let tally = self.shared.cut(cut, &mut walk, &mut steps);
                gone = std::array::from_fn(|at| self.stores[at].settle(&tally));
                (!walk.is_over()).then_some(Piece::OfShared(walk))
            }
        };
        (gone, next)
    }

    /// Forget of what each was told the names that it does not know any more. Returns how many those are, by worker.
    fn notice_gone(&mut self) -> [u64; WORKERS] {
        let Self { shared, stores, told, .. } = self;
        std::array::from_fn(|at| {
            let names = told[at].names().into_iter();
            let gone: HashSet<_> = names.filter(|name| stores[at].find(shared, &hash(name)).is_none()).collect();
            told[at].copies.retain(|(name, _), _| !gone.contains(name));
            gone.len() as u64
        })
    }

    fn check(&self) -> Result<(), TestCaseError> {
        let Self { shared, stores, told, .. } = self;
        let mut seats = 0;
        for (store, told) in stores.iter().zip(told) {
            prop_assert_eq!(store.blocks(), told.names().len());
            prop_assert_eq!(store.totals().copies, told.copies.values().map(|copies| copies.0).sum::<u64>());
            prop_assert_eq!(store.totals().placed, told.spots.len() as u64);
            let (mut plain, mut aliases, mut keys) = (0, 0, HashSet::new());
            for name in told.names() {
                let block = store.find(shared, &hash(&name)).expect("it is held");
                let spot = told.spots.get(&name).copied();
                prop_assert_eq!(store.spot(shared, block), spot);
                let seat = spot.and_then(|spot| {
                    let slot = shared.keyed(spot.key, None)?;
                    shared.kind(shared.holders(slot), store.member?)
                });
                match block {
                    Block::Plain(slot, kind) => {
                        prop_assert!(told.could_be_plain(&name));
                        prop_assert_eq!((seat, Some(shared.key(slot))), (Some(kind), spot.map(|spot| spot.key)));
                        prop_assert!(kind == Kind::Alias || shared.name(slot).map(|it| it.to_string()) == Some(name));
                        plain += 1;
                        aliases += usize::from(kind == Kind::Alias);
                    }
                    Block::Own(_) => prop_assert_eq!(seat, spot.map(|_| Kind::Odd)),
                }
                keys.extend(spot.map(|spot| spot.key));
            }
            prop_assert_eq!((store.plain, store.aliases.len()), (plain, aliases));
            for key in (0..6).map(|key| spot(key, false).key).filter(|key| !keys.contains(key)) {
                let entry = shared.keyed(key, None);
                let seat = entry.zip(store.member).and_then(|(slot, member)| shared.kind(shared.holders(slot), member));
                prop_assert_eq!(seat, None);
                prop_assert!(entry.is_none() || !shared.is_swept() || self.is_held(key), "an entry without holders");
            }
            seats += keys.len();
        }
        if shared.is_swept() {
            prop_assert_eq!(shared.seats(), seats, "nobody else sits anywhere");
        }
        Ok(())
    }

    fn check_reads(&self) -> Result<(), TestCaseError> {
        for key in (0..6).map(|key| spot(key, false).key).filter(|key| self.is_held(*key)) {
            prop_assert!(self.shared.is_key_read(key) == self.read.contains(&key));
        }
        Ok(())
    }
}

proptest! {
    #[test]
    fn equals_what_each_was_told(steps in steps()) {
        let mut world = World::new();
        for step in steps {
            world.take(step)?;
            world.check()?;
            world.check_reads()?;
        }
    }

    /// Whatever happens between the pieces of a cut, each takes whole blocks of its classes, and counts them.
    #[test]
    fn a_piece_of_a_cut_takes_whole_blocks(
        before in steps(),
        between in steps(),
        (target, steps) in (0u64..12, pieces()),
    ) {
        let mut world = World::new();
        for step in before {
            world.take(step)?;
        }
        let cut = world.census(usize::MAX).plan(target);
        let mut between = between.into_iter().filter(|step| !matches!(step, Step::Cut(..)));
        let mut piece = Some(Piece::of_store(0));
        while let Some(one) = piece {
            let (gone, next) = world.cut_piece(&cut, one, steps);
            prop_assert_eq!(gone, world.notice_gone());
            world.tidy();
            world.check()?;
            for step in between.by_ref().take(3) {
                world.take(step)?;
                world.check()?;
            }
            piece = next;
        }
    }
}

#[test]
fn what_nobody_holds_takes_no_memory() {
    let mut shared = Shared::default();
    let mut stores: Vec<_> = (0..WORKERS).map(|_| Store::default()).collect();
    let home = stores.iter_mut().map(|store| store.place_or_new(Tier::Gpu, 0)).next().expect("the same for all");
    for (number, store) in stores.iter_mut().enumerate() {
        for name in 0..20_000 {
            let hash = EngineHash::Unsigned(name + number as u64 * 1_000_000);
            store.add_at(&mut shared, home, &hash, || Some(spot(name, false)), None);
        }
    }
    let full = shared.bytes();
    assert!(stores.iter().all(|store| !store.has_own()));
    for store in &mut stores {
        drop(store.empty(&mut shared));
    }
    assert!(shared.bytes() == full && !shared.is_swept(), "that takes its time");
    let mut steps = 0;
    while !shared.is_swept() {
        shared.sweep(Steps::new(1000));
        steps += 1;
    }
    assert!((20..=21).contains(&steps), "each entry once");
    assert!(shared.bytes() < full / 5, "{} of {full} bytes", shared.bytes());
}

#[test]
fn a_sweep_counts_the_slots_that_it_passes() {
    const CHUNKS: u64 = 10;
    let mut shared = Shared::default();
    let mut stores: Vec<_> = (0..2).map(|_| Store::default()).collect();
    let home = stores.iter_mut().map(|store| store.place_or_new(Tier::Gpu, 0)).next().expect("the same for all");
    let mut hold = |at: usize, shared: &mut Shared, name| {
        stores[at].add_at(shared, home, &EngineHash::Unsigned(name), || Some(spot(name, false)), None);
    };
    (0..CHUNKS * 4096).for_each(|name| hold(0, &mut shared, name));
    hold(1, &mut shared, 0);
    for name in (0..CHUNKS * 4096).filter(|name| name % 4096 != 0).map(EngineHash::Unsigned) {
        let block = stores[0].find(&shared, &name).expect("held");
        stores[0].remove(&mut shared, &[home], (&name, block), None, false);
    }
    drop(stores[1].empty(&mut shared));
    let mut pieces = 0;
    while !shared.is_swept() {
        shared.sweep(Steps::new(16));
        pieces += 1;
    }
    assert!((CHUNKS * 64 / 16..CHUNKS * 66 / 16 + 2).contains(&pieces), "{pieces}");
}
