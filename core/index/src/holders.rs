//! Who holds a block: sets of seats, each of which stands once.
//!
//! What must always hold:
//!
//! * equal sets have one id, and the empty set has [`SetId::EMPTY`], which is never counted;
//! * a set lives while a block has it, and no longer: its count is the number of blocks that have it;
//! * a remembered step is taken only if both of its sets live the life that they lived when it was remembered.
//!
//! Why it is compact and fast: blocks of one chain have the same holders, so that there are far fewer sets than blocks.
//! What comes to one block comes to its neighbours next, and goes from them: the same seat to or from the same set.
//! Such a step is remembered, and then it is two counts that change. Otherwise the hash of the next set is that of the
//! last one plus or minus the seat's, so that looking for it reads only sets that are it; and nothing is allocated for
//! one that stands.

use crate::table::Table;

/// The number of one worker among those that share a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Seat(pub u32);

impl Seat {
    /// Of which the sum over its seats is the hash of a set, in whichever order they came.
    fn hash(self) -> u64 {
        let mut hash = (u64::from(self.0) + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        hash = (hash ^ (hash >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        hash = (hash ^ (hash >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        hash ^ (hash >> 31)
    }
}

/// The name of a set of seats, as long as a block has it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub(crate) struct SetId(u32);

impl SetId {
    pub(crate) const EMPTY: Self = Self(0);

    fn at(self) -> usize {
        self.0 as usize
    }
}

#[derive(Debug, Default)]
struct Set {
    seats: Box<[Seat]>,
    hash: u64,
    blocks: u32,
    /// How often a set of this id was gone.
    life: u32,
}

/// One seat more or less: which of both, the first set tells.
#[derive(Debug, Clone, Copy)]
struct Step {
    from: SetId,
    seat: Seat,
    to: SetId,
    lives: [u32; 2],
}

impl Step {
    /// How many are remembered; of those that meet in one place, the last.
    const REMEMBERED: usize = 64;

    fn place(from: SetId, seat: Seat) -> usize {
        let mixed = (from.0 ^ seat.0.rotate_left(16)).wrapping_mul(0x9E37_79B9);
        (mixed >> 16) as usize % Self::REMEMBERED
    }
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Holders {
    /// By id; the first is the empty set's.
    sets: Vec<Set>,
    free: Vec<SetId>,
    table: Table<u32>,
    steps: Vec<Option<Step>>,
    /// Seats of all sets.
    seats: usize,
    /// The seats of the set that is looked for.
    wanted: Vec<Seat>,
}

impl Holders {
    /// One block of `set` has `seat` as well from now on; it must not be in the set.
    pub(crate) fn with(&mut self, set: SetId, seat: Seat) -> SetId {
        debug_assert!(!self.contains(set, seat), "{seat:?} is in the set");
        self.step(set, seat)
    }

    /// One block of `set` no longer has `seat`; it must be in the set.
    pub(crate) fn without(&mut self, set: SetId, seat: Seat) -> SetId {
        debug_assert!(self.contains(set, seat), "{seat:?} is not in the set");
        self.step(set, seat)
    }

    /// One block of `set` keeps only its live seats.
    pub(crate) fn retain(&mut self, set: SetId, mut live: impl FnMut(Seat) -> bool) -> SetId {
        let Some(from) = self.sets.get(set.at()) else {
            return set;
        };
        self.wanted.clear();
        self.wanted.extend(from.seats.iter().filter(|seat| live(**seat)));
        if self.wanted.len() == from.seats.len() {
            return set;
        }
        let hash = self.wanted.iter().fold(0, |hash: u64, seat| hash.wrapping_add(seat.hash()));
        let to = self.intern(hash);
        self.release(set);
        to
    }

    /// One block of `set` is gone.
    pub(crate) fn release(&mut self, set: SetId) {
        if set == SetId::EMPTY {
            return;
        }
        let gone = &mut self.sets[set.at()];
        gone.blocks -= 1;
        if gone.blocks > 0 {
            return;
        }
        let (seats, hash) = (std::mem::take(&mut gone.seats), gone.hash);
        gone.life += 1;
        // an id that had all its lives is not used again
        if gone.life < u32::MAX {
            self.free.push(set);
        }
        self.seats -= seats.len();
        let sets = &self.sets;
        self.table.remove(hash, |at| *at == set.0, |at| sets[*at as usize].hash).expect("a live set is found");
        if self.table.len() == 0 {
            *self = Self::default();
        }
    }

    pub(crate) fn contains(&self, set: SetId, seat: Seat) -> bool {
        self.seats(set).binary_search(&seat).is_ok()
    }

    /// In ascending order.
    pub(crate) fn seats(&self, set: SetId) -> &[Seat] {
        self.sets.get(set.at()).map_or(&[], |set| &set.seats)
    }

    /// Heap memory held, in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.sets.capacity() * size_of::<Set>()
            + self.free.capacity() * size_of::<SetId>()
            + self.table.bytes()
            + self.steps.capacity() * size_of::<Option<Step>>()
            + (self.seats + self.wanted.capacity()) * size_of::<Seat>()
    }

    /// One block goes from a set to the one that has `seat` if it had not, and has not if it had.
    fn step(&mut self, from: SetId, seat: Seat) -> SetId {
        let to = self.remembered(from, seat).unwrap_or_else(|| self.look_up(from, seat));
        self.release(from);
        to
    }

    fn remembered(&mut self, from: SetId, seat: Seat) -> Option<SetId> {
        let step = self.steps.get(Step::place(from, seat))?.as_ref()?;
        let lives = [from, step.to].map(|set| self.sets[set.at()].life);
        if (step.from, step.seat, step.lives) != (from, seat, lives) {
            return None;
        }
        if step.to != SetId::EMPTY {
            self.sets[step.to.at()].blocks += 1;
        }
        Some(step.to)
    }

    fn look_up(&mut self, from: SetId, seat: Seat) -> SetId {
        if self.sets.is_empty() {
            self.sets.push(Set::default());
            self.steps.resize(Step::REMEMBERED, None);
        }
        let set = &self.sets[from.at()];
        self.wanted.clear();
        let hash = match set.seats.binary_search(&seat) {
            Ok(at) => {
                self.wanted.extend_from_slice(&set.seats[..at]);
                self.wanted.extend_from_slice(&set.seats[at + 1..]);
                set.hash.wrapping_sub(seat.hash())
            }
            Err(at) => {
                self.wanted.extend_from_slice(&set.seats[..at]);
                self.wanted.push(seat);
                self.wanted.extend_from_slice(&set.seats[at..]);
                set.hash.wrapping_add(seat.hash())
            }
        };
        let to = self.intern(hash);
        let lives = [from, to].map(|set| self.sets[set.at()].life);
        self.steps[Step::place(from, seat)] = Some(Step { from, seat, to, lives });
        to
    }

    /// The set of the wanted seats, with one more block.
    fn intern(&mut self, hash: u64) -> SetId {
        if self.wanted.is_empty() {
            return SetId::EMPTY;
        }
        let (sets, wanted) = (&self.sets, &self.wanted);
        if let Some(at) = self.table.find(hash, |at| *sets[*at as usize].seats == **wanted) {
            let id = SetId(*at);
            self.sets[id.at()].blocks += 1;
            return id;
        }
        let id = self.free.pop().unwrap_or_else(|| {
            self.sets.push(Set::default());
            SetId(u32::try_from(self.sets.len() - 1).expect("fewer sets than blocks"))
        });
        let life = self.sets[id.at()].life;
        self.sets[id.at()] = Set { seats: self.wanted.as_slice().into(), hash, blocks: 1, life };
        self.seats += self.wanted.len();
        let sets = &self.sets;
        self.table.insert(hash, id.0, |at| sets[*at as usize].hash);
        id
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, Clone)]
    enum Op {
        /// The seat comes to each of those blocks that has not got it, or goes from each that has.
        Toggle(Vec<usize>, u32),
        /// Only seats of that bitmap stay.
        Retain(Vec<usize>, u16),
        Release(usize),
    }

    const BLOCKS: usize = 12;
    const SEATS: u32 = 7;

    fn ops() -> impl Strategy<Value = Op> {
        let some = || prop::collection::vec(0..BLOCKS, 1..BLOCKS);
        prop_oneof![
            (some(), 0..SEATS).prop_map(|(blocks, seat)| Op::Toggle(blocks, seat)),
            (some(), 0..SEATS).prop_map(|(blocks, seat)| Op::Toggle(blocks, seat)),
            (some(), any::<u16>()).prop_map(|(blocks, live)| Op::Retain(blocks, live)),
            (0..BLOCKS).prop_map(Op::Release),
        ]
    }

    /// That `holders` has exactly what the blocks have.
    fn check(holders: &Holders, blocks: &[(SetId, BTreeSet<Seat>)]) -> Result<(), TestCaseError> {
        let mut sets = BTreeMap::<&BTreeSet<Seat>, (SetId, u32)>::new();
        for (id, seats) in blocks {
            prop_assert!(holders.seats(*id).iter().eq(seats), "{:?} for {seats:?}", holders.seats(*id));
            prop_assert_eq!(*id == SetId::EMPTY, seats.is_empty());
            prop_assert!((0..SEATS).map(Seat).all(|seat| holders.contains(*id, seat) == seats.contains(&seat)));
            let known = sets.entry(seats).or_insert((*id, 0));
            prop_assert_eq!(known.0, *id, "equal sets have one id");
            known.1 += 1;
        }
        sets.remove(&BTreeSet::new());
        prop_assert_eq!(holders.table.len(), sets.len());
        prop_assert_eq!(holders.seats, sets.keys().map(|seats| seats.len()).sum::<usize>());
        for (id, blocks) in sets.values() {
            prop_assert_eq!(holders.sets[id.at()].blocks, *blocks);
        }
        Ok(())
    }

    proptest! {
        #[test]
        fn blocks_have_the_sets_that_they_were_given(ops in prop::collection::vec(ops(), 1..60)) {
            let mut holders = Holders::default();
            let mut blocks = vec![(SetId::EMPTY, BTreeSet::new()); BLOCKS];
            for op in ops {
                match op {
                    Op::Toggle(chosen, seat) => for at in chosen {
                        let (id, seats) = &mut blocks[at];
                        if seats.remove(&Seat(seat)) {
                            *id = holders.without(*id, Seat(seat));
                        } else {
                            *id = holders.with(*id, Seat(seat));
                            seats.insert(Seat(seat));
                        }
                    },
                    Op::Retain(chosen, live) => for at in chosen {
                        let (id, seats) = &mut blocks[at];
                        let live = |seat: &Seat| live >> seat.0 & 1 == 1;
                        *id = holders.retain(*id, |seat| live(&seat));
                        seats.retain(live);
                    },
                    Op::Release(at) => {
                        holders.release(blocks[at].0);
                        blocks[at] = (SetId::EMPTY, BTreeSet::new());
                    }
                }
                check(&holders, &blocks)?;
            }
            for (id, _) in blocks {
                holders.release(id);
            }
            prop_assert_eq!((holders.table.len(), holders.bytes()), (0, 0));
        }
    }

    #[test]
    fn a_chain_that_many_have_has_one_set() {
        let mut holders = Holders::default();
        let mut chain = [SetId::EMPTY; 1_000];
        for seat in (0..64).rev().map(Seat) {
            for block in &mut chain {
                *block = holders.with(*block, seat);
            }
        }
        assert_eq!(chain, [chain[0]; 1_000]);
        assert_eq!(holders.table.len(), 1);
        assert!(holders.bytes() < 8 * chain.len(), "{} bytes", holders.bytes());
    }

    #[test]
    fn a_step_to_a_set_that_is_gone_is_not_taken() {
        let mut holders = Holders::default();
        let keeps_all_else = holders.with(SetId::EMPTY, Seat(9));
        let gone = holders.with(SetId::EMPTY, Seat(1));
        holders.release(gone);
        let other = holders.with(SetId::EMPTY, Seat(2));
        assert_eq!(other, gone, "its id is used again");
        let again = holders.with(SetId::EMPTY, Seat(1));
        assert_eq!(holders.seats(again), [Seat(1)]);
        assert_eq!(holders.seats(other), [Seat(2)]);
        assert_eq!(holders.seats(keeps_all_else), [Seat(9)]);
    }

    #[test]
    fn a_step_from_a_set_that_is_gone_is_not_taken() {
        let mut holders = Holders::default();
        holders.with(SetId::EMPTY, Seat(9));
        let one = holders.with(SetId::EMPTY, Seat(1));
        let both = holders.with(one, Seat(3));
        let other = holders.with(SetId::EMPTY, Seat(2));
        assert_eq!(other, one, "its id is used again");
        let with_three = holders.with(other, Seat(3));
        assert_eq!(holders.seats(with_three), [Seat(2), Seat(3)]);
        assert_eq!(holders.seats(both), [Seat(1), Seat(3)]);
    }

    #[test]
    fn an_id_has_no_more_lives_than_can_be_told_apart() {
        let mut holders = Holders::default();
        holders.with(SetId::EMPTY, Seat(9));
        let last = holders.with(SetId::EMPTY, Seat(1));
        holders.sets[last.at()].life = u32::MAX - 1;
        let last_step = holders.with(SetId::EMPTY, Seat(1));
        assert_eq!(last_step, last);
        holders.release(last);
        holders.release(last);
        let next = holders.with(SetId::EMPTY, Seat(1));
        assert_ne!(next, last);
        assert_eq!(holders.seats(next), [Seat(1)]);
    }
}
