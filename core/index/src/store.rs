//! Which blocks one worker holds.
//!
//! A block is *plain* where the worker has one copy of it, at its home, of a key that is certain and that no other of
//! its blocks has, under a number for a name. Nearly all are: those stand in what all workers of the model
//! [share](crate::shared). Everything else stands in the worker's [own](own) store, and moves to where it belongs as
//! soon as it changes.
//!
//! What must always hold:
//!
//! * a hash is known here or there, never in both;
//! * of each key that a block of this worker has, its member has the one right seat at the key's entry: a plain one for
//!   a plain block, an odd one for a block of its own store;
//! * the aliases are exactly the names of the plain blocks for which its seats are of that kind: those whose entries had
//!   another name when they came.

mod cut;
mod own;
mod snapshot;

use std::hash::BuildHasher;

use hashbrown::DefaultHashBuilder;

use crate::event::{EngineHash, Tier};
use crate::holders::SetId;
use crate::key::BlockKey;
use crate::shared::{self, Kind, Member, Shared};
use crate::steps::Steps;
use crate::table::Table;

pub(crate) use cut::{Census, Cut, Rest};
use own::{Own, Walk};
pub(crate) use own::{Place, Spot, Totals};
pub(crate) use snapshot::{PlainNames, Restored};

/// A name of the worker's own, and the entry of the block that it means.
#[derive(Debug, Clone, Copy)]
struct Alias {
    /// In halves: twelve bytes, not sixteen.
    name: [u32; 2],
    slot: shared::Slot,
}

impl Alias {
    fn new(name: u64, slot: shared::Slot) -> Self {
        Self { name: [name as u32, (name >> 32) as u32], slot }
    }

    fn name(&self) -> u64 {
        u64::from(self.name[0]) | u64::from(self.name[1]) << 32
    }
}

/// Where a block stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Block {
    /// It is plain, under a name of this kind.
    Plain(shared::Slot, Kind),
    /// In the worker's own store.
    Own(own::Slot),
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Store {
    member: Option<Member>,
    /// Plain blocks.
    plain: u64,
    aliases: Table<Alias, 9>,
    /// A plain block that had an alias turned odd by its key alone, which no table finds: no more aliases.
    no_aliases: bool,
    own: Own,
    hasher: DefaultHashBuilder,
}

impl Store {
    pub(crate) fn totals(&self) -> Totals {
        let mut totals = self.own.totals();
        totals.copies += self.plain;
        totals.placed += self.plain;
        if self.own.tier(Place::HOME) == Some(Tier::Gpu) {
            totals.gpu_copies += self.plain;
        }
        totals
    }

    /// Distinct blocks.
    pub(crate) fn blocks(&self) -> usize {
        self.plain as usize + self.own.blocks()
    }

    /// Are there blocks in the own store?
    pub(crate) fn has_own(&self) -> bool {
        self.own.blocks() > 0
    }

    /// Bytes of memory that it takes, about; what is shared apart.
    pub(crate) fn bytes(&self) -> usize {
        self.own.bytes() + self.aliases.bytes()
    }

    /// Its member, if all its blocks are plain and at this place.
    pub(crate) fn only_plain(&self, tier: Tier, group: i64) -> Option<Member> {
        self.member.filter(|_| self.own.blocks() == 0 && self.own.place(tier, group) == Some(Place::HOME))
    }

    /// Give up everything at once; what is returned takes a while to be freed.
    pub(crate) fn empty(&mut self, shared: &mut Shared) -> Self {
        if let Some(member) = self.member {
            shared.retire(member);
        }
        std::mem::take(self)
    }

    fn member(&mut self, shared: &mut Shared) -> Member {
        *self.member.get_or_insert_with(|| shared.admit())
    }

    // -- places

    pub(crate) fn place(&self, tier: Tier, group: i64) -> Option<Place> {
        self.own.place(tier, group)
    }

    pub(crate) fn place_or_new(&mut self, tier: Tier, group: i64) -> Place {
        self.own.place_or_new(tier, group)
    }

    /// Every place of a tier, whatever the group.
    pub(crate) fn places_of(&self, tier: Tier) -> Vec<Place> {
        self.own.places_of(tier)
    }

    // -- names

    pub(crate) fn find(&self, shared: &Shared, name: &EngineHash<'_>) -> Option<Block> {
        match self.look(shared, name) {
            Found::Here(block) => Some(block),
            Found::Named(_) | Found::Nowhere => None,
        }
    }

    fn look(&self, shared: &Shared, name: &EngineHash<'_>) -> Found {
        if self.own.blocks() > 0
            && let Some(slot) = self.own.find(name)
        {
            return Found::Here(Block::Own(slot));
        }
        let EngineHash::Unsigned(name) = name else {
            return Found::Nowhere;
        };
        if self.aliases.len() > 0
            && let Some(alias) = self.aliases.find(self.hasher.hash_one(name), |alias| alias.name() == *name)
        {
            return Found::Here(Block::Plain(alias.slot, Kind::Alias));
        }
        let Some(slot) = shared.named(*name) else {
            return Found::Nowhere;
        };
        match self.member.and_then(|member| shared.kind(shared.holders(slot), member)) {
            Some(Kind::Named) => Found::Here(Block::Plain(slot, Kind::Named)),
            _ => Found::Named(slot),
        }
    }

    /// Where a block stands in its chain, if it has a key.
    pub(crate) fn spot(&self, shared: &Shared, block: Block) -> Option<Spot> {
        match block {
            Block::Plain(slot, _) => Some(Spot { key: shared.key(slot), depth: shared.depth(slot), guessed: false }),
            Block::Own(slot) => self.own.spot(slot),
        }
    }

    // -- copies

    /// One copy more; it takes doubt away.
    pub(crate) fn add(&mut self, shared: &mut Shared, place: Place, name: &EngineHash<'_>) {
        if let Some(Block::Plain(slot, kind)) = self.find(shared, name) {
            self.make_odd(shared, slot, kind, name);
        }
        self.own.add(place, name);
    }

    /// One copy more of a block that stands at `spot`, unless it is known to stand elsewhere. Returns where that is, and
    /// its entry if it is plain; `None`: unknown. `before` is the entry of the block before it.
    pub(crate) fn add_at(
        &mut self,
        shared: &mut Shared,
        place: Place,
        name: &EngineHash<'_>,
        spot: impl FnOnce() -> Option<Spot>,
        before: Option<shared::Slot>,
    ) -> Option<(Spot, Option<shared::Slot>)> {
        let found = self.look(shared, name);
        if let Found::Here(block) = found
            && let Some(spot) = self.spot(shared, block)
        {
            if let Block::Plain(slot, kind) = block {
                self.make_odd(shared, slot, kind, name);
            }
            self.own.add(place, name);
            return Some((spot, None));
        }
        let spot = spot();
        if let Some(spot) = spot
            && place == Place::HOME
            && let Some(slot) = self.hold(shared, name, found, spot, before)
        {
            return Some((spot, Some(slot)));
        }
        self.own.add(place, name);
        if let Some(spot) = spot {
            self.set_spot(shared, name, spot);
        }
        spot.map(|spot| (spot, None))
    }

    /// One copy less in these places, or `left` copies left; with `doubt` what is left of an uncounted removal is
    /// doubtful. False when the block was not known to be in any of them.
    pub(crate) fn remove(
        &mut self,
        shared: &mut Shared,
        places: &[Place],
        (name, block): (&EngineHash<'_>, Block),
        left: Option<u32>,
        doubt: bool,
    ) -> bool {
        match block {
            Block::Plain(slot, kind) => {
                if !places.contains(&Place::HOME) {
                    return false;
                }
                if left.unwrap_or(0) == 0 {
                    self.let_go(shared, slot, kind, name);
                    return true;
                }
                self.make_odd(shared, slot, kind, name);
            }
            Block::Own(_) => {}
        }
        let mut known = false;
        if let Some(slot) = self.own.find(name) {
            for place in places {
                known |= self.own.remove(*place, slot, left, doubt);
            }
        }
        self.sync(shared);
        self.make_plain(shared, name);
        known
    }

    // -- plain and odd

    /// Hold a block plainly, if it can be: nothing of this name is here yet. Returns its entry.
    fn hold(
        &mut self,
        shared: &mut Shared,
        name: &EngineHash<'_>,
        found: Found,
        spot: Spot,
        before: Option<shared::Slot>,
    ) -> Option<shared::Slot> {
        let EngineHash::Unsigned(number) = *name else {
            return None;
        };
        if matches!(found, Found::Here(_)) || spot.guessed {
            return None;
        }
        let member = self.member(shared);
        let entry = match found {
            Found::Named(slot) if shared.key(slot) == spot.key => Some(slot),
            _ => shared.keyed(spot.key, before.map(shared::Slot::next)),
        };
        if let Some(entry) = entry
            && shared.kind(shared.holders(entry), member).is_some()
        {
            return None; // two hashes for one key
        }
        if self.no_aliases && !matches!(found, Found::Named(slot) if Some(slot) == entry) {
            return None;
        }
        let slot = shared.entry(spot.key, spot.depth, entry, before);
        let kind = match found {
            // only where no other entry can have the name
            Found::Nowhere if shared.name(slot).is_none() => {
                shared.give_free_name(slot, number);
                Kind::Named
            }
            _ => self.name(shared, slot, number),
        };
        shared.sit(slot, member, kind);
        self.plain += 1;
        Some(slot)
    }

    /// Have an entry found by this name: its own, or else an alias.
    fn name(&mut self, shared: &mut Shared, slot: shared::Slot, name: u64) -> Kind {
        if shared.name(slot) == Some(name) || shared.give_name(slot, name) {
            return Kind::Named;
        }
        let Self { aliases, hasher, .. } = self;
        aliases.insert(hasher.hash_one(name), Alias::new(name, slot), |alias| hasher.hash_one(alias.name()));
        Kind::Alias
    }

    /// Of a plain block that is to be plain no more.
    fn unname(&mut self, kind: Kind, name: &EngineHash<'_>) {
        self.plain -= 1;
        if let (Kind::Alias, EngineHash::Unsigned(name)) = (kind, name) {
            let Self { aliases, hasher, .. } = self;
            let of_name = |alias: &Alias| alias.name() == *name;
            aliases.remove(hasher.hash_one(name), of_name, |alias| hasher.hash_one(alias.name()));
        }
    }

    /// The only copy of a plain block is gone.
    fn let_go(&mut self, shared: &mut Shared, slot: shared::Slot, kind: Kind, name: &EngineHash<'_>) {
        self.unname(kind, name);
        let member = self.member(shared);
        shared.leave(slot, member, kind);
    }

    /// Move a plain block to the own store.
    fn make_odd(&mut self, shared: &mut Shared, slot: shared::Slot, kind: Kind, name: &EngineHash<'_>) {
        let spot = Spot { key: shared.key(slot), depth: shared.depth(slot), guessed: false };
        self.unname(kind, name);
        let member = self.member(shared);
        shared.change_seat(slot, member, kind, Kind::Odd);
        let own = self.own.add(Place::HOME, name);
        self.own.set_spot(own, spot);
        self.sync(shared);
    }

    /// Move a plain block of this key to the own store, if there is one.
    fn make_key_odd(&mut self, shared: &mut Shared, key: BlockKey) {
        let Some((member, slot)) = self.member.zip(shared.keyed(key, None)) else {
            return;
        };
        match shared.kind(shared.holders(slot), member) {
            Some(Kind::Named) => {
                let name = EngineHash::Unsigned(shared.name(slot).expect("it is held under that"));
                self.make_odd(shared, slot, Kind::Named, &name);
            }
            Some(Kind::Alias) => {
                // no table finds an alias by its key; to look through all of them once is enough
                self.no_aliases = true;
                let aliases: Vec<_> = self.aliases.iter().copied().collect();
                for alias in aliases {
                    self.make_odd(shared, alias.slot, Kind::Alias, &EngineHash::Unsigned(alias.name()));
                }
            }
            Some(Kind::Odd) | None => {}
        }
    }

    /// Move a block of the own store to the shared one, if it is plain by now.
    fn make_plain(&mut self, shared: &mut Shared, name: &EngineHash<'_>) {
        let EngineHash::Unsigned(number) = *name else {
            return;
        };
        let Some((slot, spot)) = self.own.find(name).and_then(|slot| Some((slot, self.own.plain(slot)?))) else {
            return;
        };
        let entry = shared.keyed(spot.key, None).expect("there is an entry for each key of an own block");
        if self.no_aliases && shared.name(entry) != Some(number) {
            return;
        }
        self.own.take(slot);
        let kind = self.name(shared, entry, number);
        let member = self.member(shared);
        shared.change_seat(entry, member, Kind::Odd, kind);
        self.plain += 1;
        self.sync(shared);
    }

    /// Have the seats at entries say what became of keys in the own store.
    fn sync(&mut self, shared: &mut Shared) {
        for (key, depth) in self.own.take_touched() {
            let member = self.member(shared);
            let has = self.own.has_key(key);
            let entry = shared.keyed(key, None);
            match (entry, entry.and_then(|slot| shared.kind(shared.holders(slot), member))) {
                (Some(slot), Some(Kind::Odd)) if !has => shared.leave(slot, member, Kind::Odd),
                (entry, None) if has => {
                    let slot = shared.entry(key, depth, entry, None);
                    shared.sit(slot, member, Kind::Odd);
                }
                _ => {}
            }
        }
    }

    // -- keys

    /// Have the block of this name, if it is here and has no key, stand at `spot`. Returns where the name stands then.
    pub(crate) fn spot_at(
        &mut self,
        shared: &mut Shared,
        name: &EngineHash<'_>,
        spot: impl FnOnce() -> Option<Spot>,
    ) -> Option<Spot> {
        let block = self.find(shared, name);
        if let Some(known) = block.and_then(|block| self.spot(shared, block)) {
            return Some(known);
        }
        let spot = spot()?;
        if block.is_some() {
            self.set_spot(shared, name, spot);
        }
        Some(spot)
    }

    /// Give a block without a key its place in a chain; a guess gives way to every other block that has its key.
    fn set_spot(&mut self, shared: &mut Shared, name: &EngineHash<'_>, spot: Spot) {
        let Some(slot) = self.own.find(name) else {
            return; // plain: it has a key
        };
        if spot.guessed {
            let plain = self.member.zip(shared.keyed(spot.key, None));
            let kind = plain.and_then(|(member, slot)| shared.kind(shared.holders(slot), member));
            if matches!(kind, Some(Kind::Named | Kind::Alias)) {
                return;
            }
        } else {
            self.make_key_odd(shared, spot.key);
        }
        self.own.set_spot(slot, spot);
        self.sync(shared);
        self.make_plain(shared, name);
    }

    /// Have several blocks this key?
    pub(crate) fn is_hidden(&self, key: BlockKey) -> bool {
        self.own.is_hidden(key)
    }

    /// Are there keys that several blocks have?
    pub(crate) fn any_hidden(&self) -> bool {
        self.own.any_hidden()
    }

    // -- what is expected only: all of it stands in the own store

    /// Copies in doubt, one for each block and place.
    pub(crate) fn doubtful(&self) -> u64 {
        self.own.doubtful()
    }

    /// Drop every doubtful block from its place; returns how many that were.
    pub(crate) fn drop_doubtful(&mut self, shared: &mut Shared) -> u64 {
        let dropped = self.own.drop_doubtful();
        self.sync(shared);
        dropped
    }

    /// The block of this key is in this place, if it is in no other tier (there it may be instead): no doubt any more.
    pub(crate) fn confirm(&mut self, place: Place, key: BlockKey) {
        self.own.confirm(place, key);
    }

    /// Is there anything that is expected only?
    pub(crate) fn expects(&self) -> bool {
        self.own.expects()
    }

    /// The block of this key is nowhere: its doubtful copies go, or all if it is guessed. Returns how many that were.
    pub(crate) fn drop_expected(&mut self, shared: &mut Shared, key: BlockKey) -> u64 {
        let dropped = self.own.drop_expected(key);
        self.sync(shared);
        dropped
    }

    /// Go on giving back memory that own blocks took, if it is much; to be called when no block's number is kept. True when
    /// all is done.
    pub(crate) fn tidy(&mut self, steps: &mut Steps) -> bool {
        self.own.tidy(steps)
    }

    /// Is there nothing more to give back?
    pub(crate) fn is_tidy(&self) -> bool {
        self.own.is_tidy()
    }

    // -- lookups

    /// A lookup in this store; the seats are those of the entries that it comes to.
    pub(crate) fn walk<'s>(&'s self, shared: &'s Shared) -> StoreWalk<'s> {
        StoreWalk { store: self, shared, own: self.own.walk() }
    }
}

/// What a name means.
#[derive(Debug, Clone, Copy)]
enum Found {
    Here(Block),
    /// Nothing to this worker, but it is this entry's name.
    Named(shared::Slot),
    Nowhere,
}

/// How a block of a prompt is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Hold {
    /// Not at all.
    Absent,
    /// One copy, at the worker's home.
    Plain,
    /// The own store knows.
    Odd,
}

/// Asks for one block after the other, fastest in the order of their chain.
#[derive(Debug)]
pub(crate) struct StoreWalk<'s> {
    store: &'s Store,
    shared: &'s Shared,
    own: Walk<'s>,
}

impl StoreWalk<'_> {
    /// How the worker holds the block at whose entry these sit.
    #[inline]
    pub(crate) fn hold(&self, holders: SetId) -> Hold {
        match self.store.member.and_then(|member| self.shared.kind(holders, member)) {
            None => Hold::Absent,
            Some(Kind::Named | Kind::Alias) => Hold::Plain,
            Some(Kind::Odd) => Hold::Odd,
        }
    }

    /// Does the place hold the one block of this key? Doubtful copies and guessed blocks count with `even_doubtful`.
    #[inline]
    pub(crate) fn held(&mut self, hold: Hold, place: Place, key: BlockKey, even_doubtful: bool) -> bool {
        match hold {
            Hold::Absent => false,
            Hold::Plain => place == Place::HOME,
            Hold::Odd => self.own.held(place, key, even_doubtful),
        }
    }
}

#[cfg(test)]
mod tests;
