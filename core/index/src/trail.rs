//! A prompt's way through the blocks of a model: its keys, and who holds each of them.
//!
//! Found as far as somebody asks, once for all workers. Neighbours with the same holders make one *leg*: one walk over the
//! legs tells of every worker how far its plain blocks go, however long the prompt is.
//!
//! What must always hold: what is found is used only while the blocks that it was found in are locked, and forgotten then
//! ([`Trail::restart`]). The keys stay.

use crate::holders::SetId;
use crate::key::{BlockKey, KeyChain};
use crate::shared::{Member, Shared, Slot};

/// Blocks with the same holders.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Leg {
    pub start: usize,
    /// One behind the last that is known to be of it.
    pub end: usize,
    pub holders: SetId,
}

/// See the module.
#[derive(Debug)]
pub struct Trail<'a> {
    chain: KeyChain<'a>,
    legs: Vec<Leg>,
    /// Where entries stand: from each of these blocks on in consecutive slots, or nowhere.
    runs: Vec<(usize, Option<Slot>)>,
    /// Where the next entry should stand.
    next: Option<Slot>,
    /// By number of a member, once asked for: where its plain blocks end.
    ends: Vec<u32>,
}

impl<'a> Trail<'a> {
    /// Of a prompt with these keys.
    pub(crate) fn new(chain: KeyChain<'a>) -> Self {
        Self { chain, legs: Vec::new(), runs: Vec::new(), next: None, ends: Vec::new() }
    }

    /// The key of a block, which must lie within the prompt.
    #[inline]
    pub(crate) fn key(&mut self, block: usize) -> BlockKey {
        self.chain.key(block)
    }

    /// What a block holds, whatever stands before it; `None` where the prompt has not all of it.
    pub(crate) fn content(&self, block: usize) -> Option<BlockKey> {
        self.chain.content(block)
    }

    /// Forget what was found.
    pub(crate) fn restart(&mut self) {
        self.legs.clear();
        self.runs.clear();
        self.next = None;
        self.ends.clear();
    }

    fn known(&self) -> usize {
        self.legs.last().map_or(0, |leg| leg.end)
    }

    /// The leg that a block is part of, to its end where that is before `limit`; both must lie within the prompt.
    pub(crate) fn leg(&mut self, shared: &Shared, block: usize, limit: usize) -> Leg {
        while self.known() <= block {
            self.find(shared);
        }
        let at = match self.legs.last() {
            Some(last) if last.start <= block => self.legs.len() - 1,
            _ => self.legs.partition_point(|leg| leg.end <= block),
        };
        if self.legs[at].holders != SetId::EMPTY {
            while at == self.legs.len() - 1 && self.legs[at].end < limit {
                self.find(shared);
            }
        }
        self.legs[at]
    }

    /// Where a member's unbroken run of plain blocks ends, at most at `limit`; the same for all that ask.
    pub(crate) fn plain_end(&mut self, shared: &Shared, member: Member, limit: usize) -> usize {
        if self.ends.is_empty() {
            self.find_ends(shared, limit);
        }
        self.ends[member.number()] as usize
    }

    fn find_ends(&mut self, shared: &Shared, limit: usize) {
        self.ends.resize(shared.members(), 0);
        let mut still: Vec<Member> = Vec::new();
        let mut at = 0;
        while at < limit {
            let leg = self.leg(shared, at, limit);
            if at == 0 {
                still.extend(shared.plain_seats(leg.holders));
            } else {
                let mut seats = shared.plain_seats(leg.holders).peekable();
                still.retain(|member| {
                    while seats.next_if(|seat| seat < member).is_some() {}
                    let stays = seats.peek() == Some(member);
                    if !stays {
                        self.ends[member.number()] = at as u32;
                    }
                    stays
                });
            }
            if still.is_empty() {
                return;
            }
            at = leg.end;
        }
        still.iter().for_each(|member| self.ends[member.number()] = limit as u32);
    }

    /// Find the next block.
    #[inline]
    fn find(&mut self, shared: &Shared) {
        let block = self.known();
        let slot = shared.keyed(self.chain.key(block), self.next);
        if slot != self.next || slot.is_none() {
            self.runs.push((block, slot));
        }
        self.next = slot.map(Slot::next);
        let holders = slot.map_or(SetId::EMPTY, |slot| shared.holders(slot));
        match self.legs.last_mut() {
            Some(last) if last.holders == holders => last.end += 1,
            _ => self.legs.push(Leg { start: block, end: block + 1, holders }),
        }
    }

    /// Note that a lookup found so many blocks, where they stand.
    pub(crate) fn note_reads(&mut self, shared: &Shared, blocks: usize) {
        while self.known() < blocks {
            self.find(shared);
        }
        for (at, (start, slot)) in self.runs.iter().enumerate() {
            let end = self.runs.get(at + 1).map_or(blocks, |(next, _)| blocks.min(*next));
            let mut slot = *slot;
            for _ in *start..end {
                if let Some(slot) = slot.as_mut() {
                    shared.note_read(*slot);
                    *slot = slot.next();
                }
            }
        }
    }
}
