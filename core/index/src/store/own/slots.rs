//! Blocks by slot number: in chunks, so that nothing is copied to grow, and packed in steps once most slots are free.
//!
//! What must always hold:
//!
//! * a slot is free while its block is in no place;
//! * every free slot is listed. While blocks are packed, only those are that stand before the packed ones' end: from there
//!   up to where the next one to be moved is looked for all are free, and what follows is found on the way.
//!
//! Blocks keep their order when they are packed: a lookup goes on from slot to slot.

use std::ops::{Index, IndexMut};

use super::{Block, Slot};
use crate::steps::Steps;

/// Slots of a chunk.
const CHUNK: usize = if cfg!(test) { 4 } else { 1024 };

/// Free slots that are kept whatever is in use.
const MOST_FREE: usize = if cfg!(test) { 2 } else { 1024 };

/// Steps that it takes to move a block, with all that tells where it stands.
const MOVED: usize = 64;

/// How far blocks are packed.
#[derive(Debug, Clone, Copy)]
struct Packing {
    /// Where the next one is to stand.
    to: usize,
    /// Where it is looked for.
    from: usize,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Slots {
    /// All but the last are full.
    chunks: Vec<Vec<Block>>,
    /// The one that is used next is the last.
    free: Vec<Slot>,
    used: usize,
    packing: Option<Packing>,
}

impl Slots {
    pub(super) fn len(&self) -> usize {
        self.chunks.last().map_or(0, |last| (self.chunks.len() - 1) * CHUNK + last.len())
    }

    /// Blocks.
    pub(super) fn used(&self) -> usize {
        self.used
    }

    /// Bytes of memory that it takes.
    pub(super) fn bytes(&self) -> usize {
        let blocks: usize = self.chunks.iter().map(Vec::capacity).sum();
        blocks * size_of::<Block>()
            + self.chunks.capacity() * size_of::<Vec<Block>>()
            + self.free.capacity() * size_of::<Slot>()
    }

    /// What stands in any slot, a free one perhaps.
    #[inline]
    pub(super) fn get(&self, at: usize) -> Option<&Block> {
        self.chunks.get(at / CHUNK)?.get(at % CHUNK)
    }

    /// All blocks and their slots.
    #[cfg(test)]
    pub(super) fn iter(&self) -> impl Iterator<Item = (Slot, &Block)> {
        let all = self.chunks.iter().flatten().enumerate().map(|(at, block)| (Slot(at as u32), block));
        all.filter(|(_, block)| block.places > 0)
    }

    /// Give a free slot to a block that comes to some place next.
    pub(super) fn take(&mut self) -> Slot {
        self.used += 1;
        if let Some(slot) = self.free.pop() {
            return slot;
        }
        if let Some(packing) = &mut self.packing
            && packing.to < packing.from
        {
            packing.to += 1;
            return Slot(packing.to as u32 - 1);
        }
        // 2³² blocks of one worker are more than any memory holds
        let slot = Slot(u32::try_from(self.len()).expect("fewer than 2^32 blocks"));
        if slot.at().is_multiple_of(CHUNK) {
            self.chunks.push(if slot.at() == 0 { Vec::new() } else { Vec::with_capacity(CHUNK) });
        }
        self.chunks.last_mut().expect("there is one with room").push(Block::vacant());
        slot
    }

    /// Take a block out that is in no place any more.
    pub(super) fn free(&mut self, slot: Slot) -> Block {
        self.used -= 1;
        if self.packing.is_none_or(|packing| slot.at() < packing.to) {
            self.free.push(slot);
        }
        std::mem::replace(&mut self[slot], Block::vacant())
    }

    fn drop_last(&mut self) {
        let last = self.chunks.last_mut().expect("there is a slot");
        last.pop();
        if last.is_empty() {
            self.chunks.pop();
        }
    }

    /// Begin to give back what free slots take, if it is much.
    pub(super) fn pack_if_sparse(&mut self) {
        let free = self.len() - self.used;
        if self.packing.is_none() && free >= MOST_FREE && free >= self.used {
            self.packing = Some(Packing { to: 0, from: 0 });
            self.free = Vec::new();
        }
    }

    /// Go on with it. Returns the slot that a block left and the one where it is, if there are steps to come to one; no slot
    /// of before is valid any more.
    pub(super) fn pack(&mut self, steps: &mut Steps) -> Option<(Slot, Slot)> {
        while steps.are_left()
            && let Some(Packing { to, from }) = self.packing
        {
            steps.take(1);
            match self.get(from) {
                Some(block) if block.places == 0 => self.packing = Some(Packing { to, from: from + 1 }),
                Some(_) => {
                    self.packing = Some(Packing { to: to + 1, from: from + 1 });
                    if to < from {
                        steps.take(MOVED);
                        let (from, to) = (Slot(from as u32), Slot(to as u32));
                        self[to] = std::mem::replace(&mut self[from], Block::vacant());
                        return Some((from, to));
                    }
                }
                None if to < from => {
                    self.drop_last();
                    self.packing = Some(Packing { to, from: from - 1 });
                }
                None => {
                    self.packing = None;
                    self.chunks.shrink_to_fit();
                    self.free.shrink_to_fit();
                }
            }
        }
        None
    }

    /// Is that not over?
    pub(super) fn is_packing(&self) -> bool {
        self.packing.is_some()
    }

    /// All that must always hold.
    #[cfg(test)]
    pub(super) fn check(&self) {
        let free = |at: &usize| self.get(*at).is_some_and(|block| block.places == 0);
        let Packing { to, from } = self.packing.unwrap_or(Packing { to: self.len(), from: self.len() });
        let mut listed: Vec<_> = self.free.iter().map(|slot| slot.at()).collect();
        listed.sort_unstable();
        assert_eq!(listed, (0..to).filter(free).collect::<Vec<_>>());
        assert!((to..from).all(|at| free(&at)));
        assert_eq!(self.used, self.iter().count());
        assert!(self.chunks.iter().rev().skip(1).all(|chunk| chunk.len() == CHUNK));
    }
}

impl Index<Slot> for Slots {
    type Output = Block;

    #[inline]
    fn index(&self, slot: Slot) -> &Block {
        &self.chunks[slot.at() / CHUNK][slot.at() % CHUNK]
    }
}

impl IndexMut<Slot> for Slots {
    #[inline]
    fn index_mut(&mut self, slot: Slot) -> &mut Block {
        &mut self.chunks[slot.at() / CHUNK][slot.at() % CHUNK]
    }
}
