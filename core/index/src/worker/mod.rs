//! All that is known of one worker, and the rules by which its events change it.
//!
//! **Must always hold: no worker is credited with a block that it does not hold.** Where the events leave that open, the
//! block is not credited, and trust says so.
//!
//! * *Residence.* Engines store and remove one physical copy at a time, so copies are counted. `remaining` of a removal,
//!   where sent, replaces the count.
//! * *Re-announcing workers* announce hits as if they were stores, with no matching removals, so counts run too high.
//!   From [`Worker::mark_reannouncing`], or from the moment that GPU copies exceed the usable blocks, until a clear or a
//!   new epoch: the first removal of a block ends its credit; while copies remain it is doubtful, until stored again.
//!   Doubtful blocks beyond the number of usable ones are dropped: no event ever takes them away.
//! * *Marks* of requests end with a clear, but not with one in the first batch after the mark.
//! * *Placement.* A hash gets a key when its tokens and its parent's key are known; a known hash keeps its key. A store
//!   whose parent has none waits (see [`parked`](crate::parked)). Sparse stores count as resident and are placed by
//!   another group's event of the same hash. An offload store of an unknown hash that does not show its extra keys is
//!   not placed: it might be salted.
//! * *Forgetting.* What can't be read may have been a removal: it forgets the worker, which stays `partial` until a clear
//!   or a new epoch.
//! * *Trust* says how far all that can be relied on: see [`Trust`].

mod lookup;

use std::collections::BTreeMap;

use crate::counts::{Counted, Counts};
use crate::event::{EngineHash, Event, Removed, Run, Stored, Tier};
use crate::hits::Kind;
use crate::key::BlockKey;
use crate::parked::Parked;
use crate::store::Store;
use crate::wire::Batch;

pub use lookup::{Match, Trust};

/// Doubtful blocks of a worker whose usable blocks are unknown.
const MOST_DOUBTFUL: u64 = 65_536;

/// What is known of an engine apart from its events. Figures are at least 1.
#[derive(Debug, Clone, Default)]
pub struct Facts {
    /// Blocks of the engine's GPU cache.
    pub usable_blocks: Option<u64>,
    /// The model's `attention_chunk_size`: no event carries it.
    pub attention_chunk_size: Option<u64>,
    /// EAGLE or MTP speculative decoding.
    pub eagle: bool,
    /// Hits are rounded down to this many tokens.
    pub hit_alignment: Option<u64>,
    /// Batches that name another data-parallel rank are dropped.
    pub rank: Option<i128>,
}

/// A worker's state, for people and metrics.
#[derive(Debug, Clone)]
pub struct Description {
    /// The model that it serves.
    pub model: String,
    /// How far its credit can be trusted.
    pub trust: Trust,
    /// Tokens per block; 0 before the first store.
    pub block_size: u32,
    /// Distinct blocks.
    pub blocks: u64,
    /// Physical copies of them, in every tier and group.
    pub copies: u64,
    /// Blocks in doubt, per tier and group.
    pub doubtful: u64,
    /// Blocks with a key.
    pub placed: u64,
    /// Stores that wait for their parent.
    pub parked: u64,
    /// It announces hits as stores.
    pub reannouncing: bool,
    /// Its stream does not tell at present.
    pub suspended: bool,
    /// What happened since it was added.
    pub counts: Counts,
}

/// What the events tell of one KV-cache group.
#[derive(Debug, Default)]
struct Group {
    kind: Option<Kind>,
    window: i64,
    /// 0 until the first store that has one.
    block_size: u32,
    /// A store named fewer or more hashes than its tokens hold.
    sparse: bool,
}

impl Group {
    /// No kind (vLLM < 0.22): one dense group is full attention.
    fn kind(&self) -> Kind {
        self.kind.unwrap_or(Kind::Full)
    }
}

/// What a worker held before it was emptied. Freeing it takes a while.
#[derive(Debug, Default)]
pub struct Emptied(Vec<(Store, Parked)>);

/// See the module.
#[derive(Debug)]
pub struct Worker {
    model: String,
    facts: Facts,
    counts: Counts,
    groups: BTreeMap<i64, Group>,
    store: Store,
    parked: Parked,
    emptied: Emptied,
    lost: bool,
    /// What is known may be out of date.
    suspended: bool,
    /// More copies were announced than there are blocks.
    overfull: bool,
    /// A request that makes the engine announce its hits went to this worker.
    marked_reannouncing: bool,
    /// A request with a salt or an image went to this worker.
    hidden_request: bool,
    /// No batch was applied since a request was marked.
    fresh_mark: bool,
    /// Its dialect does not show salts and images.
    hides_keys: bool,
}

impl Worker {
    /// A worker without blocks, trusted: its events are expected from its epoch's first one on.
    #[must_use]
    pub fn new(model: &str, facts: Facts) -> Self {
        Self {
            model: model.to_owned(),
            facts,
            counts: Counts::new(),
            groups: BTreeMap::new(),
            store: Store::default(),
            parked: Parked::default(),
            emptied: Emptied::default(),
            lost: false,
            suspended: false,
            overfull: false,
            marked_reannouncing: false,
            hidden_request: false,
            fresh_mark: false,
            hides_keys: false,
        }
    }

    // -- the worker's life

    /// A loss beyond repair: drop all that is known and go on as `partial`.
    pub fn forget(&mut self) {
        self.empty();
        self.lost = true;
        self.counts.add(Counted::Forgotten);
    }

    /// Another process answers for this worker: drop all that is known, begin again as `exact`.
    pub fn new_epoch(&mut self) {
        self.groups.clear();
        self.hides_keys = false;
        self.unmark();
        self.empty();
        self.settle();
        self.counts.add(Counted::Epochs);
    }

    /// Its stream does not tell at present: until `resume` its trust is `none`.
    pub fn suspend(&mut self) {
        self.suspended = true;
    }

    /// All that its stream said so far is applied.
    pub fn resume(&mut self) {
        self.suspended = false;
    }

    /// A request that makes the engine announce its hits goes to this worker.
    pub fn mark_reannouncing(&mut self) {
        self.marked_reannouncing = true;
        self.fresh_mark = true;
    }

    /// A request with a salt or an image goes to this worker: if its dialect hides those, trust is `none`.
    pub fn mark_hidden_keys(&mut self) {
        self.hidden_request = true;
        self.fresh_mark = true;
    }

    fn clear(&mut self) {
        self.empty();
        self.settle();
        if !self.fresh_mark {
            self.unmark();
        }
        self.counts.add(Counted::Cleared);
    }

    fn empty(&mut self) {
        let (store, parked) = (std::mem::take(&mut self.store), std::mem::take(&mut self.parked));
        if store.blocks() > 0 || !parked.is_empty() {
            self.emptied.0.push((store, parked));
        }
    }

    /// What was emptied since it was last taken, to be freed where nobody waits for it.
    pub fn take_emptied(&mut self) -> Emptied {
        std::mem::take(&mut self.emptied)
    }

    /// What a clear and a new epoch make good.
    fn settle(&mut self) {
        self.lost = false;
        self.overfull = false;
    }

    fn unmark(&mut self) {
        self.marked_reannouncing = false;
        self.hidden_request = false;
        self.fresh_mark = false;
    }

    fn reannouncing(&self) -> bool {
        self.overfull || self.marked_reannouncing
    }

    // -- events

    /// Apply a payload; what can't be read is counted.
    pub fn apply_payload(&mut self, payload: &[u8]) {
        match Batch::decode(payload) {
            Ok(batch) => self.apply(batch.rank, batch),
            Err(error) => {
                self.counts.add(error);
                self.forget();
            }
        }
    }

    /// Apply a batch's events in order.
    pub fn apply<'a>(&mut self, rank: Option<i128>, events: impl IntoIterator<Item = Event<'a>>) {
        if let (Some(ours), Some(theirs)) = (self.facts.rank, rank)
            && ours != theirs
        {
            self.counts.add(Counted::WrongRank);
            return;
        }
        self.counts.add(Counted::Batches);
        for event in events {
            match event {
                Event::Stored(stored) => self.stored(stored),
                Event::Removed(removed) => self.removed(&removed),
                Event::Cleared => self.clear(),
                Event::Skipped { reason, may_remove } => {
                    self.counts.add(reason);
                    if may_remove {
                        self.forget();
                    }
                }
            }
        }
        self.fresh_mark = false;
    }

    fn stored(&mut self, event: Stored<'_>) {
        let Some(tier) = event.tier else {
            self.counts.add(Counted::UnknownMedium);
            return;
        };
        self.counts.add(Counted::Stored);
        if tier == Tier::Gpu {
            self.learn(&event);
        }
        let place = self.store.place_or_new(tier, event.group);
        for hash in &event.run.hashes {
            self.store.add(place, tier, hash);
        }
        if tier == Tier::Gpu && self.facts.usable_blocks.is_some_and(|usable| self.store.totals().gpu_copies > usable) {
            self.overfull = true;
        }
        let run = event.run;
        if run.hashes.is_empty() {
            return;
        }
        let group_block_size = self.groups.get(&event.group).map_or(0, |group| group.block_size);
        if !run.is_dense() || run.block_size != group_block_size {
            self.counts.add(Counted::Unplaced);
        } else if tier != Tier::Gpu && run.extra_keys.is_none() {
            if run.hashes.iter().any(|hash| self.key_of(hash).is_none()) {
                self.counts.add(Counted::WaitingOffload);
            }
        } else {
            self.place(run);
        }
    }

    fn learn(&mut self, event: &Stored<'_>) {
        let run = &event.run;
        let group = self.groups.entry(event.group).or_default();
        group.kind = event.kind.or(group.kind);
        group.window = event.window.unwrap_or(group.window);
        if group.block_size == 0 {
            group.block_size = run.block_size;
        }
        if !run.is_dense() {
            group.sparse |= run.block_size > 0;
        } else if !run.hashes.is_empty() && run.extra_keys.is_none() {
            self.hides_keys = true;
        }
    }

    fn removed(&mut self, event: &Removed<'_>) {
        let Some(tier) = event.tier else {
            self.counts.add(Counted::UnknownMedium);
            return;
        };
        self.counts.add(Counted::Removed);
        let places = match event.group {
            Some(group) => self.store.place(tier, group).into_iter().collect(),
            None => self.store.places_of(tier),
        };
        let reannouncing = self.reannouncing();
        for (at, hash) in event.hashes.iter().enumerate() {
            let left = event.remaining.as_ref().map(|counts| counts[at]);
            let mut known = false;
            for place in &places {
                known |= self.store.remove(*place, tier, hash, left, reannouncing);
            }
            if !known {
                self.counts.add(Counted::RemovedUnknown);
            }
        }
        if self.store.totals().doubtful > self.facts.usable_blocks.unwrap_or(MOST_DOUBTFUL) {
            let dropped = self.store.drop_doubtful();
            self.counts.add_many(Counted::DoubtfulDropped, dropped);
        }
    }

    // -- placement

    fn key_of(&self, hash: &EngineHash<'_>) -> Option<BlockKey> {
        self.store.find(hash).and_then(|slot| self.store.key(slot))
    }

    /// Give the run's hashes their keys, and then those whose parked stores waited for them.
    fn place(&mut self, run: Run<'_>) {
        let mut waiting = vec![run];
        while let Some(run) = waiting.pop() {
            if !self.place_one(&run) {
                self.counts.add(Counted::Parked);
                for _ in 0..self.parked.park(run.to_owned_run()) {
                    self.counts.add(Counted::ParkedDropped);
                }
            }
            if self.parked.is_empty() {
                continue;
            }
            for hash in &run.hashes {
                if self.parked.waits_for(hash) && self.key_of(hash).is_some() {
                    waiting.extend(self.parked.take_under(hash));
                }
            }
        }
    }

    /// False when a hash could not be placed, for want of its parent's key.
    fn place_one(&mut self, run: &Run<'_>) -> bool {
        let mut parent = match &run.parent {
            None => Some(BlockKey::root(&self.model, &run.adapter, run.block_size)),
            Some(hash) => self.key_of(hash),
        };
        let mut complete = true;
        for (at, (hash, tokens)) in run.hashes.iter().zip(run.tokens.chunks_exact(run.block_size as usize)).enumerate()
        {
            let slot = self.store.find(hash);
            let known = slot.and_then(|slot| self.store.key(slot));
            parent = match (known, parent) {
                (Some(key), _) => Some(key),
                (None, None) => {
                    complete = false;
                    None
                }
                (None, Some(parent)) => {
                    let extra = run.extra_keys.as_ref().map_or(&[][..], |blocks| &blocks[at]);
                    let key = parent.child(tokens, extra);
                    if let Some(slot) = slot {
                        self.store.set_key(slot, key);
                    }
                    Some(key)
                }
            };
        }
        complete
    }

    /// The worker's state.
    #[must_use]
    pub fn describe(&self) -> Description {
        let totals = self.store.totals();
        Description {
            model: self.model.clone(),
            trust: self.trust(self.rules().as_ref()),
            block_size: self.block_size(),
            blocks: self.store.blocks() as u64,
            copies: totals.copies,
            doubtful: totals.doubtful,
            placed: totals.placed,
            parked: self.parked.len() as u64,
            reannouncing: self.reannouncing(),
            suspended: self.suspended,
            counts: self.counts.clone(),
        }
    }
}
