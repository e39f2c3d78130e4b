//! The blocks of all workers of one model: one entry per key, and who holds it.
//!
//! Workers with the same content share an entry, whatever their engines call it. Each worker is a *member* and sits at an
//! entry in one of three *kinds* of seat: nearly always the block is plain (one copy at the worker's home, no doubt about
//! it), known by the entry's own name or by a name of the worker's; everything else stands in the worker's own store, and
//! its seat here says so.
//!
//! What must always hold:
//!
//! * an entry lives while a member sits at it; a member has one seat at an entry at most;
//! * the table of keys finds every entry, the table of names those that have one; no two have the same;
//! * a member that lost all its blocks is *retired* at once: from then on its seats mean nothing, and they are swept
//!   out in bounded steps, with what they alone kept.

mod slab;

use std::hash::BuildHasher;

use hashbrown::DefaultHashBuilder;

use crate::holders::{Holders, Seat, SetId};
use crate::key::BlockKey;
use crate::steps::Steps;
use crate::store::{Census, Cut};
use crate::table::Table;

use slab::{Entry, Slab};

pub(crate) use slab::{Slot, Walk};

/// A worker's membership: from its first block until it loses all of them at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Member(u32);

/// How a member holds what an entry is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Plainly, under the entry's name.
    Named,
    /// Plainly, under a name that only this member knows.
    Alias,
    /// In its own store.
    Odd,
}

impl Member {
    pub(crate) fn number(self) -> usize {
        self.0 as usize
    }

    fn seat(self, kind: Kind) -> Seat {
        Seat(self.0 << 2 | kind as u32)
    }

    fn of(seat: Seat) -> Self {
        Self(seat.0 >> 2)
    }
}

fn kind_of(seat: Seat) -> Kind {
    match seat.0 & 3 {
        0 => Kind::Named,
        1 => Kind::Alias,
        _ => Kind::Odd,
    }
}

/// A sweep on its way through all entries.
#[derive(Debug)]
struct Sweep {
    walk: Walk,
    /// The members that it takes out altogether.
    retired: Vec<Member>,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Shared {
    slab: Slab,
    names: Table<Slot>,
    keys: Table<Slot>,
    holders: Holders,
    /// By member: is it one still?
    live: Vec<bool>,
    vacant: Vec<Member>,
    /// Members that the sweep on its way, if there is one, may have passed by.
    retired: Vec<Member>,
    sweep: Option<Sweep>,
    hasher: DefaultHashBuilder,
}

impl Shared {
    /// Bytes of memory that it takes.
    pub(crate) fn bytes(&self) -> usize {
        self.slab.bytes() + self.names.bytes() + self.keys.bytes() + self.holders.bytes() + self.live.capacity()
    }

    // -- members

    /// Their numbers are below this.
    pub(crate) fn members(&self) -> usize {
        self.live.len()
    }

    pub(crate) fn admit(&mut self) -> Member {
        let member = self.vacant.pop().unwrap_or_else(|| {
            self.live.push(false);
            Member(self.live.len() as u32 - 1)
        });
        self.live[member.0 as usize] = true;
        member
    }

    /// It holds nothing any more.
    pub(crate) fn retire(&mut self, member: Member) {
        self.live[member.0 as usize] = false;
        self.retired.push(member);
    }

    /// Are there seats that mean nothing?
    pub(crate) fn is_swept(&self) -> bool {
        self.sweep.is_none() && self.retired.is_empty()
    }

    /// Take the seats of retired members out of the next entries, as many as there are steps.
    pub(crate) fn sweep(&mut self, mut steps: Steps) {
        if self.is_swept() {
            return;
        }
        let retired = &mut self.retired;
        let start = || Sweep { walk: Walk::START, retired: std::mem::take(retired) };
        let mut walk = self.sweep.get_or_insert_with(start).walk;
        while let Some(slot) = self.slab.next(&mut walk, &mut steps) {
            self.weed(slot);
        }
        match &mut self.sweep {
            Some(sweep) if !walk.is_over() => sweep.walk = walk,
            over => self.vacant.extend(over.take().into_iter().flat_map(|sweep| sweep.retired)),
        }
    }

    /// Take the seats of retired members out of an entry. Is it still there?
    fn weed(&mut self, slot: Slot) -> bool {
        if self.is_swept() {
            return true;
        }
        let Self { slab, holders, live, .. } = self;
        let entry = slab.at_mut(slot);
        entry.holders = holders.retain(entry.holders, |seat| live[Member::of(seat).0 as usize]);
        let lives = entry.holders != SetId::EMPTY;
        if !lives {
            self.remove(slot);
        }
        lives
    }

    // -- entries

    /// The entry that has this name.
    pub(crate) fn named(&self, name: u64) -> Option<Slot> {
        self.names.find(self.hasher.hash_one(name), |slot| self.slab.at(*slot).name() == Some(name)).copied()
    }

    /// The entry of this key; a look at `near` first.
    #[inline]
    pub(crate) fn keyed(&self, key: BlockKey, near: Option<Slot>) -> Option<Slot> {
        match near.and_then(|near| Some((near, self.slab.get(near)?))) {
            Some((near, entry)) if entry.key == key && entry.holders != SetId::EMPTY => Some(near),
            _ => self.probe(key),
        }
    }

    #[cold]
    fn probe(&self, key: BlockKey) -> Option<Slot> {
        self.keys.find(self.hasher.hash_one(key), |slot| self.slab.at(*slot).key == key).copied()
    }

    pub(crate) fn key(&self, slot: Slot) -> BlockKey {
        self.slab.at(slot).key
    }

    pub(crate) fn name(&self, slot: Slot) -> Option<u64> {
        self.slab.at(slot).name()
    }

    pub(crate) fn depth(&self, slot: Slot) -> u32 {
        self.slab.at(slot).depth()
    }

    pub(crate) fn holders(&self, slot: Slot) -> SetId {
        self.slab.at(slot).holders
    }

    /// How a member holds what these seats hold, if it does.
    #[inline]
    pub(crate) fn kind(&self, holders: SetId, member: Member) -> Option<Kind> {
        let seats = self.holders.seats(holders);
        let at = match seats {
            [only] => usize::from(Member::of(*only).0 < member.0),
            _ => seats.partition_point(|seat| Member::of(*seat).0 < member.0),
        };
        seats.get(at).filter(|seat| Member::of(**seat) == member).map(|seat| kind_of(*seat))
    }

    /// The entry of a key, `found` if that is known, or a new one behind that of `before`. Somebody has to sit down there.
    pub(crate) fn entry(&mut self, key: BlockKey, depth: u32, found: Option<Slot>, before: Option<Slot>) -> Slot {
        found.filter(|slot| self.weed(*slot)).unwrap_or_else(|| {
            let Self { slab, keys, hasher, .. } = self;
            let slot = slab.insert(Entry::new(key, depth), before);
            keys.insert(hasher.hash_one(key), slot, |slot| hasher.hash_one(slab.at(*slot).key));
            slot
        })
    }

    /// Let a member sit down that has no seat there.
    pub(crate) fn sit(&mut self, slot: Slot, member: Member, kind: Kind) {
        let entry = self.slab.at_mut(slot);
        entry.holders = self.holders.with(entry.holders, member.seat(kind));
    }

    /// Give a member another seat than it has.
    pub(crate) fn change_seat(&mut self, slot: Slot, member: Member, from: Kind, to: Kind) {
        let entry = self.slab.at_mut(slot);
        let without = self.holders.without(entry.holders, member.seat(from));
        entry.holders = self.holders.with(without, member.seat(to));
    }

    /// Take a member's seat away. The entry is gone when that was the last one.
    pub(crate) fn leave(&mut self, slot: Slot, member: Member, kind: Kind) {
        let entry = self.slab.at_mut(slot);
        entry.holders = self.holders.without(entry.holders, member.seat(kind));
        if entry.holders == SetId::EMPTY {
            self.remove(slot);
        }
    }

    /// Have an entry that has no name found by this one, if no other has it.
    pub(crate) fn give_name(&mut self, slot: Slot, name: u64) -> bool {
        if self.slab.at(slot).name().is_some() || self.named(name).is_some_and(|other| self.weed(other)) {
            return false;
        }
        self.give_free_name(slot, name);
        true
    }

    /// The same where the entry is known to have no name, and no other to have this one.
    pub(crate) fn give_free_name(&mut self, slot: Slot, name: u64) {
        let Self { slab, names, hasher, .. } = self;
        slab.at_mut(slot).give_name(name);
        names.insert(hasher.hash_one(name), slot, |slot| hasher.hash_one(slab.at(*slot).name().unwrap_or_default()));
    }

    /// Of an entry without holders.
    fn remove(&mut self, slot: Slot) {
        let Self { slab, names, keys, hasher, .. } = self;
        let (key, name) = (slab.at(slot).key, slab.at(slot).name());
        keys.remove(hasher.hash_one(key), |other| *other == slot, |slot| hasher.hash_one(slab.at(*slot).key));
        if let Some(name) = name {
            let rehash = |slot: &Slot| hasher.hash_one(slab.at(*slot).name().unwrap_or_default());
            names.remove(hasher.hash_one(name), |other| *other == slot, rehash);
        }
        slab.remove(slot);
    }

    /// Show the holders of entries from there on, as many as there are steps. Where to go on, if that is not all.
    pub(crate) fn look_through(&self, mut from: Walk, steps: usize, mut look: impl FnMut(Slot, SetId)) -> Option<Walk> {
        let mut steps = Steps::new(steps);
        while let Some(slot) = self.slab.next(&mut from, &mut steps) {
            look(slot, self.slab.at(slot).holders);
        }
        (!from.is_over()).then_some(from)
    }

    // -- reads, and making room

    pub(crate) fn note_read(&self, slot: Slot) {
        self.slab.at(slot).note_read();
    }

    pub(crate) fn is_read(&self, slot: Slot) -> bool {
        self.slab.at(slot).is_read()
    }

    pub(crate) fn is_key_read(&self, key: BlockKey) -> bool {
        self.keyed(key, None).is_some_and(|slot| self.is_read(slot))
    }

    /// Of all entries.
    #[cfg(test)]
    pub(crate) fn seats(&self) -> usize {
        let (mut walk, mut steps) = (Walk::START, Steps::new(usize::MAX));
        let slots = std::iter::from_fn(|| self.slab.next(&mut walk, &mut steps));
        slots.map(|slot| self.holders.seats(self.holders(slot)).len()).sum()
    }

    /// The live members that these are plain seats of, in order.
    pub(crate) fn plain_seats(&self, holders: SetId) -> impl Iterator<Item = Member> {
        let seats = self.holders.seats(holders).iter().filter(|seat| kind_of(**seat) != Kind::Odd);
        seats.map(|seat| Member::of(*seat)).filter(|member| self.live[member.0 as usize])
    }

    /// Count plain blocks in.
    pub(crate) fn census(&self, census: &mut Census, walk: &mut Walk, steps: &mut Steps) {
        let mut last = (SetId::EMPTY, 0);
        while let Some(slot) = self.slab.next(walk, steps) {
            let entry = self.slab.at(slot);
            if entry.holders != last.0 {
                last = (entry.holders, self.plain_seats(entry.holders).count() as u64);
                steps.take(self.holders.seats(entry.holders).len());
            }
            census.add(entry.depth(), entry.is_read(), last.1);
        }
    }

    /// Drop the blocks of these classes that are held under their entries' names; entries that were passed are not read
    /// from then on. Returns whose blocks they were.
    pub(crate) fn cut(&mut self, cut: &Cut, walk: &mut Walk, steps: &mut Steps) -> Tally {
        let mut dropped = Tally(vec![0; self.members()]);
        while let Some(slot) = self.slab.next(walk, steps) {
            let Self { slab, holders, live, .. } = self;
            let entry = slab.at_mut(slot);
            let read = entry.forget_read();
            if !cut.takes(entry.depth(), read) {
                continue;
            }
            steps.take(Steps::DROPPED + holders.seats(entry.holders).len());
            entry.holders = holders.retain(entry.holders, |seat| {
                let (member, named) = (Member::of(seat).number(), kind_of(seat) == Kind::Named);
                dropped.0[member] += u64::from(named && live[member]);
                !named && live[member]
            });
            if entry.holders == SetId::EMPTY {
                self.remove(slot);
            }
        }
        dropped
    }
}

/// Blocks by number of a member.
#[derive(Debug)]
pub(crate) struct Tally(Vec<u64>);

impl Tally {
    pub(crate) fn of(&self, member: Member) -> u64 {
        self.0.get(member.number()).copied().unwrap_or_default()
    }
}
