//! Which key each hash has: from its tokens and its parent's key, in whatever order the events come.

use super::Worker;
use crate::counts::Counted;
use crate::event::{EngineHash, ExtraKey, Run};
use crate::key::BlockKey;
use crate::parked::Waiting;
use crate::shared::{self, Shared};
use crate::store::{Block, Place, Spot};

impl Worker {
    /// Where a hash stands, as a block or as the name of a parent, and its entry if it is plain.
    fn spot_of(&self, shared: &Shared, hash: &EngineHash<'_>) -> Option<(Spot, Option<shared::Slot>)> {
        if let Some(block) = self.store.find(shared, hash)
            && let Some(spot) = self.store.spot(shared, block)
        {
            let entry = if let Block::Plain(slot, _) = block { Some(slot) } else { None };
            return Some((spot, entry));
        }
        self.names.get(hash).map(|spot| (spot, None))
    }

    pub(super) fn placed(&self, shared: &Shared, hash: &EngineHash<'_>) -> Option<Spot> {
        self.store.find(shared, hash).and_then(|block| self.store.spot(shared, block))
    }

    /// Give the run's hashes their keys, and then those whose parked stores waited for them. Each of the run's hashes gets
    /// one copy more in the place `to`, if any.
    pub(super) fn place(&mut self, shared: &mut Shared, run: Run<'_>, mut to: Option<Place>) {
        let mut waiting = vec![run];
        while let Some(run) = waiting.pop() {
            let parent = match &run.parent {
                None => Some((Parent::Root(self.root_of(&run)), None)),
                Some(parent) => {
                    let spot = self.spot_of(shared, parent);
                    let spot = spot.or_else(|| Some((self.adopt(shared, &run)?, None)));
                    spot.map(|(spot, entry)| (Parent::Block(spot), entry))
                }
            };
            let (parent, entry) = parent.unwrap_or((Parent::Unknown, None));
            if !self.place_behind(shared, parent, entry, &run, to.take()) {
                self.park(shared, &run);
            }
            if self.parked.is_empty() {
                continue;
            }
            for hash in run.parent.iter().chain(&run.hashes) {
                if self.parked.waits_for(hash) && self.spot_of(shared, hash).is_some() {
                    waiting.extend(self.parked.take_under(hash));
                }
            }
        }
    }

    /// False when a hash could not be placed, for want of its parent's key.
    fn place_behind(
        &mut self,
        shared: &mut Shared,
        mut parent: Parent,
        mut before: Option<shared::Slot>,
        run: &Run<'_>,
        to: Option<Place>,
    ) -> bool {
        let mut complete = true;
        for (hash, (tokens, extra)) in run.hashes.iter().zip(run.blocks()) {
            let child = || parent.child(tokens, extra);
            let placed = match to {
                Some(place) => self.store.add_at(shared, place, hash, child, before),
                None => self.store.spot_at(shared, hash, child).map(|spot| (spot, None)),
            };
            let Some((spot, entry)) = placed else {
                complete = false;
                continue;
            };
            (parent, before) = (Parent::Block(spot), entry);
        }
        complete
    }

    fn root_of(&self, run: &Run<'_>) -> BlockKey {
        BlockKey::root(&self.model, &run.adapter, run.block_size)
    }

    fn park(&mut self, shared: &Shared, run: &Run<'_>) {
        self.counts.add(Counted::Parked);
        let store = Waiting { run: run.to_owned_run(), content: self.content_of(run) };
        let dropped = self.parked.park(self.removals.step(), store);
        self.counts.add_many(Counted::ParkedDropped, dropped.len() as u64);
        // Blocks that are still there get no key now, even when their parents do.
        self.lost |=
            dropped.iter().flat_map(|run| run.hashes.iter()).any(|name| self.store.find(shared, name).is_some());
    }

    // -- adoption

    /// What the first block holds, if it has no extra keys.
    fn content_of(&self, run: &Run<'_>) -> Option<BlockKey> {
        let (tokens, extra) = run.blocks().next()?;
        extra.is_empty().then(|| self.root_of(run).content(tokens))
    }

    /// Take the unknown parent of this store for the last block of an observed run that goes on with it.
    fn adopt(&mut self, shared: &Shared, run: &Run<'_>) -> Option<Spot> {
        if self.runs.is_empty() {
            return None;
        }
        let content = self.content_of(run)?;
        let (parent, first) = (run.parent.as_ref()?, run.hashes.first()?);
        self.adopt_by(shared, parent, first, content)
    }

    /// Stores that wait may go on with a run that was observed just now, whose next block holds this.
    pub(super) fn adopt_parked(&mut self, shared: &mut Shared, content: BlockKey) {
        for number in self.parked.with_content(content) {
            let Some(Waiting { run, .. }) = self.parked.get(number) else {
                continue; // an earlier one has placed it
            };
            if let (Some(parent), Some(first)) = (run.parent.clone(), run.hashes.first().cloned())
                && self.adopt_by(shared, &parent, &first, content).is_some()
                && let Some(run) = self.parked.take(number)
            {
                self.place(shared, run, None);
            }
        }
    }

    fn adopt_by(
        &mut self,
        shared: &Shared,
        parent: &EngineHash<'_>,
        first: &EngineHash<'_>,
        content: BlockKey,
    ) -> Option<Spot> {
        if self.placed(shared, first).is_some() {
            return None;
        }
        let (key, blocks) = self.runs.before(content)?;
        let spot = Spot { key, depth: blocks - 1, guessed: true };
        self.names.give(parent, spot);
        self.counts.add(Counted::Adopted);
        Some(spot)
    }
}

/// What stands before a block.
#[derive(Debug, Clone, Copy)]
enum Parent {
    /// It is the first one of its context.
    Root(BlockKey),
    Block(Spot),
    Unknown,
}

impl Parent {
    fn child(self, tokens: &[u32], extra: &[ExtraKey<'_>]) -> Option<Spot> {
        match self {
            Self::Root(root) => Some(Spot { key: root.child(tokens, extra), depth: 0, guessed: false }),
            Self::Block(spot) => Some(spot.next(spot.key.child(tokens, extra))),
            Self::Unknown => None,
        }
    }
}
