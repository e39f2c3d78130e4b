//! Entries by slot number: memory in chunks, so that nothing is ever copied to grow, and an empty chunk is given back.
//!
//! A new entry stands right behind a given one where that slot is free: a chain that is read in order is then read as
//! memory lies.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::holders::SetId;
use crate::key::BlockKey;
use crate::steps::Steps;

/// Entries of a chunk.
const CHUNK: usize = 4096;
const WORDS: usize = CHUNK / 64;

/// The number of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Slot(pub(crate) u32);

impl Slot {
    fn new(chunk: usize, at: usize) -> Self {
        Self((chunk * CHUNK + at) as u32)
    }

    fn chunk(self) -> usize {
        self.0 as usize / CHUNK
    }

    fn at(self) -> usize {
        self.0 as usize % CHUNK
    }

    pub(crate) fn next(self) -> Self {
        Self(self.0.wrapping_add(1))
    }
}

const READ: u32 = 1 << 31;
const NAMED: u32 = 1 << 30;
/// The deepest that is told apart.
const DEEPEST: u32 = NAMED - 1;

/// One key, and who holds it.
#[derive(Debug)]
pub(crate) struct Entry {
    pub key: BlockKey,
    /// The engine hash under which most holders know it; see [`Entry::name`].
    name: u64,
    /// Empty where the slot is free.
    pub holders: SetId,
    /// Depth, is it named, was it read.
    marks: AtomicU32,
}

impl Entry {
    pub(crate) fn new(key: BlockKey, depth: u32) -> Self {
        Self { key, name: 0, holders: SetId::EMPTY, marks: AtomicU32::new(depth.min(DEEPEST)) }
    }

    pub(crate) fn name(&self) -> Option<u64> {
        (self.marks.load(Ordering::Relaxed) & NAMED != 0).then_some(self.name)
    }

    pub(crate) fn give_name(&mut self, name: u64) {
        self.name = name;
        *self.marks.get_mut() |= NAMED;
    }

    /// Blocks before it in its chain.
    pub(crate) fn depth(&self) -> u32 {
        self.marks.load(Ordering::Relaxed) & DEEPEST
    }

    /// Has a lookup found it since the last sweep of the cap?
    pub(crate) fn is_read(&self) -> bool {
        self.marks.load(Ordering::Relaxed) & READ != 0
    }

    pub(crate) fn note_read(&self) {
        // most are noted already, and a write would cost every reader its cache line
        if !self.is_read() {
            self.marks.fetch_or(READ, Ordering::Relaxed);
        }
    }

    /// It is not read from now on. Was it?
    pub(crate) fn forget_read(&mut self) -> bool {
        let read = self.is_read();
        *self.marks.get_mut() &= !READ;
        read
    }
}

#[derive(Debug)]
struct Chunk {
    /// As many as were ever used.
    entries: Vec<Entry>,
    /// One bit for each of them that is free.
    free: [u64; WORDS],
    used: usize,
    /// It stands among the open ones.
    open: bool,
}

impl Chunk {
    fn new() -> Self {
        Self { entries: Vec::with_capacity(CHUNK), free: [0; WORDS], used: 0, open: false }
    }

    fn is_free(&self, at: usize) -> bool {
        at == self.entries.len() && at < CHUNK || self.free[at / 64] >> (at % 64) & 1 == 1
    }

    /// The first place from `from` on that an entry stands in, if its word of bits has one.
    fn used_in_word(&self, from: usize) -> Option<usize> {
        let word = from / 64;
        let used = !self.free[word] & (u64::MAX << (from % 64));
        let found = word * 64 + used.trailing_zeros() as usize;
        (used != 0 && found < self.entries.len()).then_some(found)
    }

    /// The first free place, from `from` on if there is one.
    fn first_free(&self, from: usize) -> Option<usize> {
        let first = self.free[from / 64] & (u64::MAX << (from % 64));
        if first != 0 {
            return Some(from / 64 * 64 + first.trailing_zeros() as usize);
        }
        let words = (from / 64 + 1..WORDS).chain(0..=from / 64);
        let found = words.filter(|word| self.free[*word] != 0).map(|word| (word, self.free[word])).next();
        let bit = found.map(|(word, bits)| word * 64 + bits.trailing_zeros() as usize);
        bit.or((self.entries.len() < CHUNK).then_some(self.entries.len()))
    }
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Slab {
    chunks: Vec<Option<Box<Chunk>>>,
    /// Chunks with free places; the last one is filled first.
    open: VecDeque<u32>,
    /// Numbers of chunks that were given back.
    gone: Vec<u32>,
    /// Where in the last of the open ones the next place is looked for.
    from: usize,
    len: usize,
}

impl Slab {
    /// Bytes of memory that it takes.
    pub(crate) fn bytes(&self) -> usize {
        let chunks = self.chunks.iter().flatten().count();
        let each = size_of::<Chunk>() + CHUNK * size_of::<Entry>();
        chunks * each + self.chunks.capacity() * size_of::<usize>() + (self.open.capacity() + self.gone.capacity()) * 4
    }

    /// What stands in a slot that was handed out and not freed since.
    pub(crate) fn at(&self, slot: Slot) -> &Entry {
        &self.chunks[slot.chunk()].as_ref().expect("an entry's chunk is there").entries[slot.at()]
    }

    pub(crate) fn at_mut(&mut self, slot: Slot) -> &mut Entry {
        &mut self.chunks[slot.chunk()].as_mut().expect("an entry's chunk is there").entries[slot.at()]
    }

    /// What stands in any slot, a free one perhaps.
    #[inline]
    pub(crate) fn get(&self, slot: Slot) -> Option<&Entry> {
        self.chunks.get(slot.chunk())?.as_ref()?.entries.get(slot.at())
    }

    /// Put an entry in, right behind another one if it can be.
    pub(crate) fn insert(&mut self, entry: Entry, behind: Option<Slot>) -> Slot {
        let next = behind.map(Slot::next).filter(|next| {
            let chunk = self.chunks.get(next.chunk()).and_then(Option::as_ref);
            chunk.is_some_and(|chunk| chunk.is_free(next.at()))
        });
        let slot = next.unwrap_or_else(|| self.place());
        let chunk = self.chunks[slot.chunk()].as_mut().expect("a free place's chunk is there");
        if slot.at() == chunk.entries.len() {
            chunk.entries.push(entry);
        } else {
            chunk.free[slot.at() / 64] &= !(1 << (slot.at() % 64));
            chunk.entries[slot.at()] = entry;
        }
        chunk.used += 1;
        self.len += 1;
        slot
    }

    fn place(&mut self) -> Slot {
        while let Some(last) = self.open.back() {
            let number = *last as usize;
            let chunk = self.chunks[number].as_mut();
            if let Some(chunk) = chunk {
                if let Some(at) = chunk.first_free(self.from) {
                    self.from = at;
                    return Slot::new(number, at);
                }
                chunk.open = false;
            }
            self.open.pop_back();
            self.from = 0;
        }
        let number = self.gone.pop().map_or(self.chunks.len(), |number| number as usize);
        assert!(number < 1 << 20, "2^32 blocks are more than any memory holds");
        if number == self.chunks.len() {
            self.chunks.push(None);
        }
        self.chunks[number] = Some(Box::new(Chunk { open: true, ..Chunk::new() }));
        self.open.push_back(number as u32);
        self.from = 0;
        Slot::new(number, 0)
    }

    pub(crate) fn remove(&mut self, slot: Slot) {
        let number = slot.chunk();
        let chunk = self.chunks[number].as_mut().expect("an entry's chunk is there");
        chunk.entries[slot.at()].holders = SetId::EMPTY;
        chunk.free[slot.at() / 64] |= 1 << (slot.at() % 64);
        chunk.used -= 1;
        self.len -= 1;
        if chunk.used == 0 && self.len > 0 {
            let open = chunk.open;
            self.chunks[number] = None;
            self.gone.push(number as u32);
            if open {
                self.open.retain(|other| *other as usize != number);
                self.from = 0;
            }
        } else if !chunk.open {
            chunk.open = true;
            self.open.push_front(number as u32);
        }
    }

    /// The next entry on a walk, as far as steps are left. An entry takes one, and so do up to 64 slots without any.
    pub(crate) fn next(&self, walk: &mut Walk, steps: &mut Steps) -> Option<Slot> {
        while steps.are_left()
            && let Some(from) = walk.0
        {
            steps.take(1);
            let Some(chunk) = self.chunks.get(from.chunk()) else {
                walk.0 = None;
                break;
            };
            if let Some(at) = chunk.as_ref().and_then(|chunk| chunk.used_in_word(from.at())) {
                let found = Slot::new(from.chunk(), at);
                walk.0 = Some(found.next());
                return Some(found);
            }
            let word = from.at() / 64 + 1;
            let is_last = chunk.as_ref().is_none_or(|chunk| word * 64 >= chunk.entries.len());
            walk.0 = Some(if is_last { Slot::new(from.chunk() + 1, 0) } else { Slot::new(from.chunk(), word * 64) });
        }
        None
    }
}

/// A way through all entries in the order of their slots, in as many pieces as it takes. What comes meanwhile may be left
/// out; what stays is met once.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Walk(Option<Slot>);

impl Walk {
    pub(crate) const START: Self = Self(Some(Slot(0)));

    pub(crate) fn is_over(self) -> bool {
        self.0.is_none()
    }
}
