//! A compact hash table of small items: two of them find the blocks of a model.
//!
//! What must always hold:
//!
//! * an item is found by its hash until it is removed, whatever the hashes are: bad ones only make it slow;
//! * a group's count of *passed* items is the number of items that found it full and went on, or stuck at its maximum
//!   until the shard is laid out anew. So a search that comes to a group nobody passed is over, and removing leaves
//!   no marker behind. It is counted by classes, as few searches are then led on by items that are not theirs;
//! * one call lays out one shard at most, of about [`SPLIT`] items unless their hashes are bad: no call is long,
//!   however large the table;
//! * a shard without items holds no memory, and the memory of a table is in proportion to its items.
//!
//! Why it is compact and fast: a group of twelve slot numbers, a byte of each one's hash and the counts fill one cache
//! line, so that a search touches one line and then the item that it wants. Groups need not be a power of two in
//! number, so shards grow by less than a fifth, each at a time of its own, and twelve slots of thirteen are in use just
//! before.
//! Where items come and go for ever, ever more of them stand where they found room, far from home: so a shard is laid
//! out anew when as many as a third of its items came late.

use std::ops::{Index, IndexMut};

use crate::page::Page;
use crate::steps::Steps;

/// From how many items on a shard that is full splits instead of growing.
const SPLIT: usize = 16_384;

/// Below so many items a shard doubles.
const SMALL: usize = 1_024;

/// How much a larger one grows, in 256ths.
const GROWTH: usize = 304;

/// Bits of a hash that choose the shard are its top ones. Below them are 32 for the group, and 8 that tell items apart.
const SHARD_BITS: u32 = 24;

/// The most slots that a group may have: their tags stand in its two words.
const MOST: usize = 12;

/// Some slots, and what a search wants to know of them before it looks at the items.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
struct Group<T, const N: usize> {
    /// From the lowest byte on the tags of the first eight items, then zeros. Whole words: a byte that was just written
    /// would make the next reading of all wait.
    first: u64,
    /// The same of four more; in byte 4 the number of items; in three bits each how many items passed, by class.
    second: u64,
    /// The first ones are items, the others copies of some that were.
    items: [T; N],
}

impl<T: Copy, const N: usize> Group<T, N> {
    const LEN: u32 = 32;
    const PASSED: u32 = Self::LEN + 8;
    const MOST_PASSED: u64 = 7;

    fn empty(any: T) -> Self {
        Self { first: 0, second: 0, items: [any; N] }
    }

    fn len(&self) -> usize {
        (self.second >> Self::LEN) as u8 as usize
    }

    fn items(&self) -> &[T] {
        &self.items[..self.len()]
    }

    fn find(&self, tag: Tag, eq: &mut impl FnMut(&T) -> bool) -> Option<usize> {
        Slots::with_tag(self.first, self.second, tag).find(|slot| eq(&self.items[*slot]))
    }

    /// Changes the tag of a slot.
    fn flip(&mut self, slot: usize, by: u64) {
        if slot < 8 {
            self.first ^= by << (8 * slot);
        } else {
            self.second ^= by << (8 * slot - 64);
        }
    }

    fn tag(&self, slot: usize) -> u64 {
        let word = if slot < 8 { self.first >> (8 * slot) } else { self.second >> (8 * slot - 64) };
        word & 0xFF
    }

    /// False if it is full.
    #[inline]
    fn put(&mut self, tag: Tag, item: T) -> bool {
        let slot = self.len();
        if slot >= N {
            return false;
        }
        self.second += 1 << Self::LEN;
        self.flip(slot, tag.0.into());
        self.items[slot] = item;
        true
    }

    /// The last item comes into its slot.
    fn take(&mut self, slot: usize) -> T {
        let (item, last) = (self.items[slot], self.len() - 1);
        self.items[slot] = self.items[last];
        let (taken, moved) = (self.tag(slot), self.tag(last));
        self.second -= 1 << Self::LEN;
        self.flip(slot, taken ^ moved);
        self.flip(last, moved);
        item
    }

    #[inline]
    fn passed(&self, tag: Tag) -> u64 {
        (self.second >> (Self::PASSED + tag.class())) & Self::MOST_PASSED
    }

    fn let_pass(&mut self, tag: Tag) {
        if self.passed(tag) < Self::MOST_PASSED {
            self.second += 1 << (Self::PASSED + tag.class());
        }
    }

    /// One that passed is gone. What could not be counted any more stays.
    fn forget_passed(&mut self, tag: Tag) {
        if self.passed(tag) < Self::MOST_PASSED {
            self.second -= 1 << (Self::PASSED + tag.class());
        }
    }
}

/// Some of the slots of a group: of slot 0 to 7 bit 0 of byte 0 to 7, of the others bit 1 of byte 0 to 3.
struct Slots(u64);

impl Slots {
    const EACH: u64 = u64::from_le_bytes([1; 8]);

    /// Those with that tag, and perhaps one whose tag differs by one bit; none behind the items.
    #[inline]
    fn with_tag(first: u64, second: u64, tag: Tag) -> Self {
        // the top bits of bytes that are 0, or that are 1 and follow such a byte: a slot without item has neither,
        // since no tag is 0 or 1
        let zeros = |word: u64| word.wrapping_sub(Self::EACH) & !word & (Self::EACH << 7);
        let tags = Self::EACH * u64::from(tag.0);
        let more = zeros(second ^ tags) & u64::from(u32::MAX);
        Self(zeros(first ^ tags) >> 7 | more >> 6)
    }
}

impl Iterator for Slots {
    type Item = usize;

    #[inline]
    fn next(&mut self) -> Option<usize> {
        let bit = self.0.trailing_zeros() as usize;
        self.0 &= self.0.checked_sub(1)?;
        Some(bit / 8 + bit % 8 * 8)
    }
}

/// A byte of an item's hash, but never 0 or 1.
#[derive(Clone, Copy)]
struct Tag(u8);

impl Tag {
    fn of(hash: u64) -> Self {
        Self((hash as u8).max(2))
    }

    /// The class among those that passed: by how many bits its count is shifted.
    fn class(self) -> u32 {
        3 * u32::from(self.0 & 7)
    }
}

/// Groups that are asked for at once: 4 KiB. All pages but small tables' are alike, so that what one shard gives back is
/// what the next one takes, and the heap stays in one piece.
const PAGE: usize = 64;

/// The groups of a shard, in pages.
#[derive(Debug)]
struct Groups<T, const N: usize> {
    pages: Box<[Page<Group<T, N>>]>,
    len: usize,
}

impl<T: Copy, const N: usize> Groups<T, N> {
    fn new(len: usize, any: T) -> Self {
        let page = |first: usize| Page::new(PAGE.min(len - first), Group::empty(any));
        Self { pages: (0..len).step_by(PAGE).map(page).collect(), len }
    }

    fn none() -> Self {
        Self { pages: Box::default(), len: 0 }
    }

    fn bytes(&self) -> usize {
        self.pages.iter().map(Page::bytes).sum::<usize>() + size_of_val(&*self.pages)
    }

    fn len(&self) -> usize {
        self.len
    }

    #[inline]
    fn get(&self, at: usize) -> Option<&Group<T, N>> {
        self.pages.get(at / PAGE)?.get(at % PAGE)
    }

    fn iter(&self) -> impl Iterator<Item = &Group<T, N>> {
        self.pages.iter().flat_map(|page| page.iter())
    }
}

impl<T, const N: usize> Index<usize> for Groups<T, N> {
    type Output = Group<T, N>;

    #[inline]
    fn index(&self, at: usize) -> &Group<T, N> {
        &self.pages[at / PAGE][at % PAGE]
    }
}

impl<T, const N: usize> IndexMut<usize> for Groups<T, N> {
    #[inline]
    fn index_mut(&mut self, at: usize) -> &mut Group<T, N> {
        &mut self.pages[at / PAGE][at % PAGE]
    }
}

/// A hash table of its own: all items whose hashes begin alike.
#[derive(Debug)]
struct Shard<T, const N: usize> {
    groups: Groups<T, N>,
    len: u32,
    /// How many items came and found their first group full, since it was laid out.
    late: u32,
    /// How many top bits the hashes of its items share.
    depth: u32,
}

impl<T: Copy, const N: usize> Shard<T, N> {
    fn empty(depth: u32) -> Self {
        Self { groups: Groups::none(), len: 0, late: 0, depth }
    }

    /// With that many groups, free slots of which hold copies of `any`.
    fn of_groups(groups: usize, depth: u32, any: T) -> Self {
        Self { groups: Groups::new(groups, any), ..Self::empty(depth) }
    }

    /// How many groups have room for `len` items and then some: in 256ths, how often for them all.
    fn groups_for(len: usize, times: usize) -> usize {
        if len == 0 {
            return 0;
        }
        let groups = (len * times / 256 * 13 / 12 + 1).div_ceil(N);
        if groups <= PAGE { groups } else { groups.next_multiple_of(PAGE) }
    }

    fn len(&self) -> usize {
        self.len as usize
    }

    fn slots(&self) -> usize {
        self.groups.len() * N
    }

    fn is_full(&self) -> bool {
        self.len() >= self.slots() * 12 / 13
    }

    /// Items that came late stay where they are when there is room at home again: in time most would.
    fn is_worn(&self) -> bool {
        self.late > self.len / 3
    }

    fn is_sparse(&self) -> bool {
        self.len() * 3 < self.slots() && self.groups.len() > 1
    }

    /// The group where an item stands unless it found it full.
    fn home(&self, hash: u64) -> usize {
        ((u64::from((hash >> 8) as u32) * self.groups.len() as u64) >> 32) as usize
    }

    fn path(&self, hash: u64) -> Path {
        Path { at: self.home(hash), steps: 0, groups: self.groups.len() }
    }

    /// The group and the slot of an item. Most searches end in their first group, the others go on elsewhere: the less
    /// there is to do for one, the more of them the processor has under way while it waits for memory.
    #[inline]
    fn place_of(&self, hash: u64, mut eq: impl FnMut(&T) -> bool) -> Option<(usize, usize)> {
        let (at, tag) = (self.home(hash), Tag::of(hash));
        let group = self.groups.get(at)?;
        if let Some(slot) = group.find(tag, &mut eq) {
            return Some((at, slot));
        }
        if group.passed(tag) == 0 { None } else { self.place_further_on(hash, eq) }
    }

    #[inline(never)]
    fn place_further_on(&self, hash: u64, mut eq: impl FnMut(&T) -> bool) -> Option<(usize, usize)> {
        let (mut path, tag) = (self.path(hash), Tag::of(hash));
        while self.groups[path.at].passed(tag) > 0 && !path.is_over() {
            path.go_on();
            if let Some(slot) = self.groups[path.at].find(tag, &mut eq) {
                return Some((path.at, slot));
            }
        }
        None
    }

    /// There must be a free slot.
    fn put(&mut self, hash: u64, item: T) {
        let tag = Tag::of(hash);
        let mut path = self.path(hash);
        while !self.groups[path.at].put(tag, item) {
            self.groups[path.at].let_pass(tag);
            path.go_on();
        }
        self.len += 1;
        self.late += u32::from(path.steps > 0);
    }

    fn take(&mut self, hash: u64, eq: impl FnMut(&T) -> bool) -> Option<T> {
        let (group, slot) = self.place_of(hash, eq)?;
        Some(self.take_at(group, slot, hash))
    }

    /// Of the item of that hash which stands there.
    fn take_at(&mut self, found: usize, slot: usize, hash: u64) -> T {
        let mut path = self.path(hash);
        while path.at != found {
            self.groups[path.at].forget_passed(Tag::of(hash));
            path.go_on();
        }
        self.len -= 1;
        self.groups[found].take(slot)
    }

    fn iter(&self) -> impl Iterator<Item = &T> {
        self.groups.iter().flat_map(Group::items)
    }

    fn lay_out(&mut self, groups: usize, rehash: impl Fn(&T) -> u64) {
        let Some(any) = self.iter().next() else {
            *self = Self::empty(self.depth);
            return;
        };
        let mut new = Self::of_groups(groups, self.depth, *any);
        for group in self.groups.iter() {
            // hashes come from all over the memory: those of a group first, so that their loads overlap
            let mut hashes = [0; MOST];
            hashes.iter_mut().zip(group.items()).for_each(|(hash, item)| *hash = rehash(item));
            hashes.iter().zip(group.items()).for_each(|(hash, item)| new.put(*hash, *item));
        }
        *self = Self { late: 0, ..new };
    }

    fn resize(&mut self, rehash: impl Fn(&T) -> u64) {
        // what is small may be large for it
        let times = if self.len() < SMALL { 512 } else { GROWTH };
        self.lay_out(Self::groups_for(self.len(), times), rehash);
    }

    /// Keeps the items of which the next bit is 0, and gives those of which it is 1; with so much room for each.
    fn split(&mut self, times: [usize; 2], rehash: impl Fn(&T) -> u64) -> Self {
        let hashes = self.hashes(rehash);
        let next_bit = |hash: u64| (hash >> (u64::BITS - 1 - self.depth)) as usize & 1;
        let ones: usize = hashes.iter().map(|(hash, _)| next_bit(*hash)).sum();
        let any = hashes.first().expect("a full shard has items").1;
        let half = |len, times| Self::of_groups(Self::groups_for(len, times), self.depth + 1, any);
        let mut halves = [half(self.len() - ones, times[0]), half(ones, times[1])];
        for (hash, item) in hashes {
            halves[next_bit(hash)].put(hash, item);
        }
        let [zeros, ones] = halves.map(|half| Self { late: 0, ..half });
        *self = zeros;
        ones
    }

    /// All items with their hashes. Those come from all over the memory: one tight loop, so that its loads overlap.
    fn hashes(&self, rehash: impl Fn(&T) -> u64) -> Vec<(u64, T)> {
        let mut hashes = Vec::with_capacity(self.len());
        for group in self.groups.iter() {
            hashes.extend(group.items().iter().map(|item| (rehash(item), *item)));
        }
        hashes
    }
}

/// The groups where an item may stand, in order. Steps become longer, since items that leave one full group would fill
/// its neighbours next; then they are of one, so that no group is left out.
struct Path {
    at: usize,
    steps: usize,
    groups: usize,
}

impl Path {
    fn longest_step(&self) -> usize {
        self.groups.min(16)
    }

    fn go_on(&mut self) {
        self.steps += 1;
        self.at += if self.steps <= self.longest_step() { self.steps } else { 1 };
        if self.at >= self.groups {
            self.at -= self.groups;
        }
    }

    fn is_over(&self) -> bool {
        self.steps == self.longest_step() + self.groups
    }
}

/// Where a way through a table goes on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Place {
    shard: usize,
    group: usize,
}

/// See the module. The caller hashes and compares: the table knows only its items.
///
/// All bits of a hash count. Items of four bytes make groups of one cache line; for others, `N` is how many of them
/// go with 16 bytes into whole lines, at most 12.
#[derive(Debug)]
pub(crate) struct Table<T: Copy, const N: usize = 12> {
    shards: Vec<Shard<T, N>>,
    /// By the top bits of a hash: the number of its shard. As long as a power of two.
    directory: Vec<u32>,
    /// How far down those bits are, but for one.
    shift: u32,
    len: usize,
}

impl<T: Copy, const N: usize> Default for Table<T, N> {
    fn default() -> Self {
        const {
            assert!(N > 0 && N <= MOST, "each item has a tag");
            let unused = size_of::<Group<T, N>>() - size_of::<u128>() - N * size_of::<T>();
            assert!(unused < size_of::<T>() || N == MOST, "a group has room for more");
        }
        Self { shards: Vec::new(), directory: Vec::new(), shift: u64::BITS - 1, len: 0 }
    }
}

impl<T: Copy, const N: usize> Table<T, N> {
    /// The item of that hash which `eq` takes.
    pub(crate) fn find(&self, hash: u64, eq: impl FnMut(&T) -> bool) -> Option<&T> {
        let shard = &self.shards[self.shard_of(hash)?];
        let (group, slot) = shard.place_of(hash, eq)?;
        Some(&shard.groups[group].items[slot])
    }

    /// Takes an item that the table does not have. `rehash` gives the hash of any item in it.
    pub(crate) fn insert(&mut self, hash: u64, item: T, rehash: impl Fn(&T) -> u64) {
        let mut at = self.shard_of(hash).unwrap_or_else(|| {
            self.shards.push(Shard::empty(0));
            self.directory.push(0);
            0
        });
        if self.shards[at].is_full() && self.shards[at].len() >= SPLIT && self.split(at, &rehash) {
            at = self.shard_of(hash).expect("there are shards");
        }
        let shard = &mut self.shards[at];
        if shard.len == 0 {
            *shard = Shard::of_groups(1, shard.depth, item);
        } else if shard.is_full() {
            shard.resize(rehash);
        } else if shard.is_worn() {
            shard.lay_out(shard.groups.len(), rehash);
        }
        shard.put(hash, item);
        self.len += 1;
    }

    /// Takes out the item of that hash which `eq` takes. `rehash` gives the hash of any item that stays.
    pub(crate) fn remove(&mut self, hash: u64, eq: impl FnMut(&T) -> bool, rehash: impl Fn(&T) -> u64) -> Option<T> {
        let at = self.shard_of(hash)?;
        let shard = &mut self.shards[at];
        let item = shard.take(hash, eq)?;
        self.len -= 1;
        if self.len == 0 {
            *self = Self::default();
        } else if shard.len == 0 || shard.is_sparse() {
            shard.resize(rehash);
        }
        Some(item)
    }

    /// Takes out what `goes` says, from a place on, as far as there are steps. Returns that, and where to go on; what was
    /// laid out meanwhile may be left out or met twice. Here a shard is not laid out before all of it is gone through.
    pub(crate) fn take_out(
        &mut self,
        from: Place,
        steps: &mut Steps,
        goes: impl Fn(&T) -> bool,
        rehash: impl Fn(&T) -> u64,
    ) -> (Vec<T>, Option<Place>) {
        let Place { mut shard, mut group } = from;
        let mut taken = Vec::new();
        while let Some(at) = self.shards.get_mut(shard) {
            if group >= at.groups.len() || at.len == 0 {
                if at.len == 0 || at.is_sparse() {
                    steps.take(Steps::LOOKED_AT * at.len());
                    at.resize(&rehash);
                }
                (shard, group) = (shard + 1, 0);
                continue;
            }
            if !steps.are_left() {
                return (taken, Some(Place { shard, group }));
            }
            for slot in (0..at.groups[group].len()).rev() {
                let item = at.groups[group].items[slot];
                steps.take(Steps::LOOKED_AT);
                if goes(&item) {
                    steps.take(Steps::DROPPED);
                    at.take_at(group, slot, rehash(&item));
                    self.len -= 1;
                    taken.push(item);
                }
            }
            group += 1;
        }
        if self.len == 0 {
            *self = Self::default();
        }
        (taken, None)
    }

    /// Items.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Heap memory held, in bytes.
    pub(crate) fn bytes(&self) -> usize {
        let groups: usize = self.shards.iter().map(|shard| shard.groups.bytes()).sum();
        groups + self.shards.capacity() * size_of::<Shard<T, N>>() + self.directory.capacity() * size_of::<u32>()
    }

    /// Shows the items from a place on, as far as there are steps. Returns where to go on, if that is not all of them.
    pub(crate) fn look_through(&self, from: Place, steps: &mut Steps, mut look: impl FnMut(&T)) -> Option<Place> {
        let Place { mut shard, mut group } = from;
        while let Some(at) = self.shards.get(shard) {
            let Some(items) = at.groups.get(group) else {
                (shard, group) = (shard + 1, 0);
                continue;
            };
            if !steps.are_left() {
                return Some(Place { shard, group });
            }
            steps.take(N);
            items.items().iter().for_each(&mut look);
            group += 1;
        }
        None
    }

    /// All items, in no order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.shards.iter().flat_map(Shard::iter)
    }

    fn shard_of(&self, hash: u64) -> Option<usize> {
        // two shifts, as none of all 64 bits is allowed
        self.directory.get((hash >> 1 >> self.shift) as usize).map(|at| *at as usize)
    }

    /// Makes two of one shard, unless its items share so many bits that the directory would outgrow the shards.
    fn split(&mut self, at: usize, rehash: impl Fn(&T) -> u64) -> bool {
        let depth = self.shards[at].depth;
        if 1 << depth == self.directory.len() {
            if depth == SHARD_BITS || self.directory.len() > self.shards.len() * 2 {
                return false;
            }
            self.directory = self.directory.iter().flat_map(|shard| [*shard; 2]).collect();
            self.shift -= 1;
        }
        let new = self.shards.len();
        let times = [new - 1, new].map(room_of);
        let ones = self.shards[at].split(times, rehash);
        self.shards.push(ones);
        let run = self.directory.len() >> depth;
        let first = self.directory.iter().position(|shard| *shard as usize == at).expect("a shard is found");
        for entry in &mut self.directory[first + run / 2..first + run] {
            *entry = new as u32;
        }
        true
    }
}

/// How much room a new shard has, in 256ths of its items: evenly between none and what growing gives, so that shards
/// which fill at the same rate do not grow at the same time, and their free slots do not come and go with it.
fn room_of(shard: usize) -> usize {
    // the golden ratio: multiples of it lie evenly
    let even = (shard as u32).wrapping_mul(0x9E37_79B9) as usize;
    256 + ((even * (GROWTH - 256)) >> 32)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    /// How an item gets its hash.
    #[derive(Debug, Clone, Copy)]
    enum Hashing {
        Good,
        OneShard,
        OneGroup,
        OneTag,
        Four,
        Constant(u64),
    }

    impl Hashing {
        fn of(self, item: u32) -> u64 {
            let good = good(item);
            match self {
                Self::Good => good,
                Self::OneShard => good >> SHARD_BITS,
                Self::OneGroup => good | 0xFF_FFFF_FF00,
                Self::OneTag => good & !0xFF,
                Self::Four => good >> 62,
                Self::Constant(hash) => hash,
            }
        }

        /// So few items that the test ends.
        fn most(self) -> u32 {
            match self {
                Self::Good | Self::OneShard => 30_000,
                Self::OneTag => 3_000,
                Self::OneGroup | Self::Four | Self::Constant(_) => 400,
            }
        }
    }

    fn good(item: u32) -> u64 {
        xxhash_rust::xxh3::xxh3_64(&item.to_le_bytes())
    }

    fn with_good_hashes(items: u32) -> Table<u32> {
        let mut table = Table::<u32>::default();
        (0..items).for_each(|item| table.insert(good(item), item, |one| good(*one)));
        table
    }

    fn drop_from(table: &mut Table<u32>, item: u32) {
        assert_eq!(table.remove(good(item), |one| *one == item, |one| good(*one)), Some(item));
    }

    impl<T: Copy, const N: usize> Table<T, N> {
        /// All that must hold within; gives how many counts of passed items there are that would let a search go on.
        fn check(&self, hash_of: impl Fn(&T) -> u64) -> usize {
            assert_eq!(self.len, self.shards.iter().map(Shard::len).sum::<usize>());
            assert!(self.directory.is_empty() || self.directory.len().is_power_of_two());
            assert!(self.directory.len() <= 4 * self.shards.len(), "the directory outgrew the shards");
            let mut going_on = 0;
            for (number, shard) in self.shards.iter().enumerate() {
                assert_eq!(shard.groups.len() == 0, shard.len == 0);
                assert_eq!(shard.len(), shard.iter().count());
                let mut passed = BTreeMap::<_, u128>::new();
                for (at, group) in shard.groups.iter().enumerate() {
                    for (slot, item) in group.items().iter().enumerate() {
                        let hash = hash_of(item);
                        assert_eq!(self.shard_of(hash), Some(number));
                        assert_eq!(group.tag(slot), u64::from(Tag::of(hash).0));
                        let mut path = shard.path(hash);
                        while path.at != at {
                            *passed.entry((path.at, Tag::of(hash).class())).or_default() += 1;
                            path.go_on();
                            assert!(!path.is_over());
                        }
                    }
                    assert!((group.len()..MOST).all(|slot| group.tag(slot) == 0), "tags without items");
                }
                for (at, group) in shard.groups.iter().enumerate() {
                    for tag in (0..8).map(Tag) {
                        let (noted, right) = (group.passed(tag), passed.get(&(at, tag.class())).copied().unwrap_or(0));
                        assert!(
                            u128::from(noted) == right || noted == Group::<T, N>::MOST_PASSED,
                            "{noted} for {right}"
                        );
                        going_on += usize::from(noted != 0);
                    }
                }
            }
            going_on
        }
    }

    fn hashings() -> impl Strategy<Value = Hashing> {
        prop_oneof![
            Just(Hashing::Good),
            Just(Hashing::OneShard),
            Just(Hashing::OneGroup),
            Just(Hashing::OneTag),
            Just(Hashing::Four),
            Just(Hashing::Constant(0)),
            any::<u64>().prop_map(Hashing::Constant),
            Just(Hashing::Constant(u64::MAX)),
        ]
    }

    #[derive(Debug, Clone, Copy)]
    enum Change {
        Come,
        Go,
        /// Every third one or so is taken out, in pieces of so many steps.
        TakenOut(usize),
    }

    /// Items that come or go one after another: from which on, and how many; in 100ths of the most that there may be.
    fn runs() -> impl Strategy<Value = Vec<(Change, u32, u32)>> {
        let change = prop_oneof![
            2 => Just(Change::Come),
            2 => Just(Change::Go),
            1 => (1..20_000_usize).prop_map(Change::TakenOut),
        ];
        prop::collection::vec((change, 0..100_u32, 1..60_u32), 1..12)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        #[test]
        fn finds_what_a_map_finds(hashing in hashings(), runs in runs()) {
            let hash_of = |item: &[u32; 3]| hashing.of(item[0]);
            let mut table: Table<[u32; 3], 9> = Table::default();
            let mut model = BTreeMap::new();
            for (round, (change, from, share)) in (0..).zip(runs) {
                let [from, share] = [from, share].map(|part| hashing.most() * part / 100);
                if let Change::TakenOut(steps) = change {
                    let goes = |number: u32| good(number ^ round).is_multiple_of(3);
                    let mut place = Some(Place::default());
                    while let Some(from) = place {
                        let (taken, rest) =
                            table.take_out(from, &mut Steps::new(steps), |item| goes(item[0]), hash_of);
                        for item in taken {
                            prop_assert!(goes(item[0]));
                            prop_assert_eq!(model.remove(&item[0]), Some(item));
                        }
                        table.check(hash_of);
                        place = rest;
                    }
                    prop_assert!(!model.keys().any(|number| goes(*number)));
                    continue;
                }
                for number in (from..from + share).map(|number| number % hashing.most()) {
                    let same = |one: &[u32; 3]| one[0] == number;
                    let found = table.find(hashing.of(number), same).copied();
                    prop_assert_eq!(found, model.get(&number).copied());
                    if let Change::Go = change {
                        prop_assert_eq!(table.remove(hashing.of(number), same, hash_of), model.remove(&number));
                    } else if found.is_none() {
                        let item = [number, round, number ^ round];
                        table.insert(hash_of(&item), item, hash_of);
                        model.insert(number, item);
                    }
                }
                table.check(hash_of);
                prop_assert_eq!(table.len(), model.len());
                let items: BTreeMap<_, _> = table.iter().map(|item| (item[0], *item)).collect();
                prop_assert_eq!(&items, &model);
            }
        }
    }

    #[test]
    fn an_item_costs_at_most_seven_and_a_half_bytes() {
        let mut table = Table::<u32>::default();
        let (mut costs, mut next) = (vec![], 1_000);
        for item in 0..300_000 {
            table.insert(good(item), item, |one| good(*one));
            if table.len() == next {
                costs.push(table.bytes() as f64 / table.len() as f64);
                next += next / 20;
            }
        }
        let average = costs.iter().sum::<f64>() / costs.len() as f64;
        assert!(average <= 6.7, "{average}");
        let many = &costs[costs.len() / 2..];
        assert!(many.iter().all(|cost| *cost <= 7.5), "{many:?}");
    }

    #[test]
    fn no_items_no_memory() {
        let mut table = with_good_hashes(0);
        assert_eq!(table.bytes(), 0);
        assert!(table.find(7, |_| true).is_none());
        assert!(table.remove(7, |_| true, |one| good(*one)).is_none());
        for most in [1, 11, 12, 13, 100, 40_000] {
            table = with_good_hashes(most);
            assert_ne!(table.bytes(), 0);
            (0..most).for_each(|item| drop_from(&mut table, item));
            assert_eq!((table.len(), table.bytes()), (0, 0));
        }
    }

    #[test]
    fn memory_goes_with_the_items() {
        let mut table = with_good_hashes(100_000);
        for left in [50_000, 20_000, 5_000, 1_000] {
            (left..table.len() as u32).for_each(|item| drop_from(&mut table, item));
            let cost = table.bytes() as f64 / f64::from(left);
            assert!(cost <= 6.5 * 3.0, "{cost} bytes an item for {left}");
        }
        table.check(|one| good(*one));
    }

    #[test]
    fn coming_and_going_for_ever_makes_nothing_worse() {
        for live in [9_000, 11_000, 23_000] {
            let hashed = Cell::new(0);
            let rehash = |one: &u32| {
                hashed.set(hashed.get() + 1);
                good(*one)
            };
            let mut table = with_good_hashes(live);
            let bytes = table.bytes();
            let rounds = 20 * live;
            for item in 0..rounds {
                drop_from(&mut table, item);
                table.insert(good(item + live), item + live, rehash);
            }
            let going_on = table.check(|one| good(*one)) as f64 / (8.0 * bytes as f64 / 64.0);
            let hashed = f64::from(hashed.get()) / f64::from(rounds);
            println!(
                "{live}: load {:.3} goes on {going_on:.3} of searches, hashed {hashed:.2}",
                f64::from(live) / (bytes as f64 / 64.0 * 12.0)
            );
            assert!(going_on < 0.5, "{going_on} of searches go on past a group");
            assert!(hashed < 2.0, "{hashed} items are hashed anew for each that comes");
            assert!(table.bytes() <= bytes, "{} bytes, {bytes} before", table.bytes());
        }
    }

    #[test]
    fn no_call_lays_out_more_than_a_shard() {
        let mut table = Table::<u32>::default();
        let hashed = Cell::new(0);
        let rehash = |one: &u32| {
            hashed.set(hashed.get() + 1);
            good(*one)
        };
        let mut most = 0;
        for item in 0..200_000 {
            table.insert(good(item), item, rehash);
            most = most.max(hashed.take());
        }
        for item in 0..200_000 {
            table.remove(good(item), |one| *one == item, rehash);
            most = most.max(hashed.take());
        }
        assert!((SPLIT..SPLIT * 13 / 10).contains(&most), "{most}");
    }
}
