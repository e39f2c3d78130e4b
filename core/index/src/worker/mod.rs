//! All that is known of one worker, and the rules by which its events change it.
//!
//! **Must always hold: no worker is credited with a block that it does not hold.** Where the events leave that open, the
//! block is not credited, and trust says so.
//!
//! * *Residence.* Engines store and remove one physical copy at a time, so copies are counted. `remaining` of a removal,
//!   where sent, replaces the count.
//! * *Re-announcing workers* announce hits as if they were stores, with no matching removals, so counts run too high.
//!   From [`Worker::mark_reannouncing`], or from the moment that GPU copies exceed the usable blocks (until a clear), the
//!   first removal of a block ends its credit; while copies remain it is doubtful, until stored again or seen in an
//!   answer. Doubtful blocks beyond the number of usable ones are dropped: no event ever takes them away.
//! * *Marks* of requests end with a new epoch, but not with one before which no batch came after the mark: the request
//!   may have gone to the new process. A clear may be older than the request, so it ends none.
//! * *Placement.* A hash gets a key when its tokens and its parent's key are known; a known hash keeps its key. A store
//!   whose parent has none waits (see [`parked`](crate::parked)). Sparse stores count as resident and are placed by
//!   another group's event of the same hash. An offload store of an unknown hash that does not show its extra keys is
//!   not placed: it might be salted.
//! * *Answers* tell what the engine had (see [`Answer`]). Removals end that; those that may have named any block, all.
//! * *Forgetting.* What can't be read may have been a removal: it forgets the worker, which stays `partial` until a clear,
//!   a new epoch, or until all comes again.
//! * *Trust* says how far all that can be relied on: see [`Trust`].

mod life;
mod lookup;
mod observe;
mod placement;
mod snapshot;

use std::collections::BTreeMap;

use crate::adoption::Names;
use crate::counts::{Counted, Counts};
use crate::event::{EngineHash, Event, ExtraKey, Removed, SkipReason, Stored, Tier};
use crate::hits::Kind;
use crate::observed::Runs;
use crate::parked::Parked;
use crate::removals::Removals;
use crate::shared::{Shared, Tally};
use crate::steps::Steps;
use crate::store::{Block, Census, Cut, Rest, Store};
use crate::wire::Batch;

pub use life::Emptied;
use life::{Mark, Marks};
pub use lookup::{Match, Trust};
pub(crate) use observe::Asked;
pub use observe::{Answer, Observation};

/// Steps of giving back memory after each batch.
const STEPS_OF_TIDYING: usize = 4_096;

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
#[derive(Debug, Clone, PartialEq, Eq)]
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
    /// Of those, the ones whose key is a guess.
    pub guessed: u64,
    /// Stores that wait for their parent.
    pub parked: u64,
    /// Blocks that are held by what answers showed.
    pub observed: u64,
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

/// See the module.
#[derive(Debug)]
pub struct Worker {
    model: String,
    facts: Facts,
    counts: Counts,
    groups: BTreeMap<i64, Group>,
    store: Store,
    parked: Parked,
    names: Names,
    runs: Runs,
    removals: Removals,
    emptied: Emptied,
    marks: Marks,
    /// Lookups ask it block by block, as was said last.
    slow: bool,
    lost: bool,
    /// Batches and other steps that changed it, or may have.
    changes: u64,
    /// What is known may be out of date.
    suspended: bool,
    /// More copies were announced than there are blocks.
    overfull: bool,
    /// Its dialect does not show salts and images.
    hides_keys: bool,
    /// A store had extra keys that this version can't tell the kind of.
    shows_unknown_keys: bool,
}

impl Worker {
    /// A worker without blocks, trusted: its events are expected from its epoch's first one on. `registration` tells it
    /// from every other one of its name; the first is 1.
    #[must_use]
    pub fn new(model: &str, facts: Facts, registration: u64) -> Self {
        Self {
            model: model.to_owned(),
            facts,
            counts: Counts::new(),
            groups: BTreeMap::new(),
            store: Store::default(),
            parked: Parked::default(),
            names: Names::default(),
            runs: Runs::default(),
            removals: Removals::new(registration),
            emptied: Emptied::default(),
            marks: Marks::default(),
            slow: false,
            changes: 0,
            lost: false,
            suspended: false,
            overfull: false,
            hides_keys: false,
            shows_unknown_keys: false,
        }
    }

    // -- events

    /// Apply a payload; what can't be read is counted.
    pub fn apply_payload(&mut self, shared: &mut Shared, payload: &[u8]) {
        match Batch::decode(payload) {
            Ok(batch) => self.apply(shared, batch.rank, batch),
            Err(error) => {
                self.counts.add(error);
                self.forget(shared);
            }
        }
    }

    /// Apply a batch's events in order.
    pub fn apply<'a>(&mut self, shared: &mut Shared, rank: Option<i128>, events: impl IntoIterator<Item = Event<'a>>) {
        if let (Some(ours), Some(theirs)) = (self.facts.rank, rank)
            && ours != theirs
        {
            self.counts.add(Counted::WrongRank);
            self.lost = true;
            return;
        }
        self.counts.add(Counted::Batches);
        for event in events {
            match event {
                Event::Stored(stored) => self.stored(shared, stored),
                Event::Removed(removed) => self.removed(shared, &removed),
                Event::Cleared => self.clear(shared),
                Event::Skipped { reason, may_remove } => {
                    self.counts.add(reason);
                    if may_remove {
                        self.forget(shared);
                    } else if reason != SkipReason::UnknownTag {
                        self.lost = true; // a store
                    }
                }
            }
        }
        if !self.suspended {
            // else it may be of the process before
            self.marks = self.marks.map(Mark::after_batch);
        }
        self.store.tidy(&mut Steps::new(STEPS_OF_TIDYING));
    }

    fn stored(&mut self, shared: &mut Shared, event: Stored<'_>) {
        let Some(tier) = event.tier else {
            self.counts.add(Counted::UnknownMedium);
            return;
        };
        self.counts.add(Counted::Stored);
        if tier == Tier::Gpu {
            self.learn(&event);
        }
        let mut keys = event.run.extra_keys.iter().flatten().flatten();
        if !self.shows_unknown_keys && keys.any(|key| matches!(key, ExtraKey::Opaque(_))) {
            self.shows_unknown_keys = true;
            self.runs = Runs::default();
        }
        let place = self.store.place_or_new(tier, event.group);
        let run = event.run;
        let group_block_size = self.groups.get(&event.group).map_or(0, |group| group.block_size);
        let fits = run.is_dense() && run.block_size == group_block_size;
        if fits && (tier == Tier::Gpu || run.extra_keys.is_some()) && !run.hashes.is_empty() {
            self.place(shared, run, Some(place));
        } else {
            for hash in &run.hashes {
                self.store.add(shared, place, hash);
            }
            if !run.hashes.is_empty() && !fits {
                self.counts.add(Counted::Unplaced);
            } else if !run.hashes.iter().all(|hash| self.placed(shared, hash).is_some()) {
                self.counts.add(Counted::WaitingOffload);
            }
        }
        if tier == Tier::Gpu && self.facts.usable_blocks.is_some_and(|usable| self.store.totals().gpu_copies > usable) {
            self.overfull = true;
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
        } else if !run.hashes.is_empty() && run.extra_keys.is_none() && !self.hides_keys {
            self.hides_keys = true;
            self.runs = Runs::default();
        }
    }

    fn removed(&mut self, shared: &mut Shared, event: &Removed<'_>) {
        let Some(tier) = event.tier else {
            self.counts.add(Counted::UnknownMedium);
            for hash in &event.hashes {
                self.note_removal(shared, hash);
            }
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
            let block = self.note_removal(shared, hash);
            let remove = |block| self.store.remove(shared, &places, (hash, block), left, reannouncing);
            if !block.is_some_and(remove) {
                self.counts.add(Counted::RemovedUnknown);
            }
        }
        if self.store.doubtful() > self.facts.usable_blocks.unwrap_or(MOST_DOUBTFUL) {
            let dropped = self.store.drop_doubtful(shared);
            self.counts.add_many(Counted::DoubtfulDropped, dropped);
        }
    }

    /// A copy of this block leaves some cache, even one that is unknown here. Returns where it stands.
    fn note_removal(&mut self, shared: &Shared, hash: &EngineHash<'_>) -> Option<Block> {
        let block = self.store.find(shared, hash);
        let spot = block.and_then(|block| self.store.spot(shared, block));
        let key = spot.filter(|spot| !spot.guessed).map(|spot| spot.key);
        let position = self.removals.named(key);
        match key {
            Some(key) => self.runs.end_with(key, position),
            None => self.runs.doubt(position),
        }
        block
    }

    // -- the bound on all workers together

    /// Batches that were applied: nothing else brings blocks, but an image.
    pub(crate) fn batches(&self) -> u64 {
        self.counts.get(Counted::Batches)
    }

    /// Distinct blocks.
    pub(crate) fn blocks(&self) -> u64 {
        self.store.blocks() as u64
    }

    /// Does it hold anything that lookups must ask for block by block? Said where that changes.
    pub(crate) fn becomes_slow(&mut self) -> Option<bool> {
        let slow = self.store.has_own() || !self.runs.is_empty();
        (std::mem::replace(&mut self.slow, slow) != slow).then_some(slow)
    }

    /// Bytes of memory that it takes, about; what is shared apart.
    pub(crate) fn bytes(&self) -> usize {
        size_of::<Self>() + self.store.bytes() + self.parked.bytes() + self.runs.bytes() + self.removals.bytes()
    }

    /// Of that, what making room can give back.
    pub(crate) fn block_bytes(&self) -> usize {
        self.store.bytes()
    }

    /// Count the blocks in that it holds in a way of its own, from a number on. Returns where the others begin.
    pub(crate) fn census(&self, shared: &Shared, census: &mut Census, from: usize, steps: &mut Steps) -> Option<usize> {
        self.store.census(shared, census, from, steps)
    }

    /// Drop the blocks of these classes that only this worker's names find. Returns how many those are, and what there is
    /// left to go through.
    pub(crate) fn cut(&mut self, shared: &mut Shared, cut: &Cut, rest: Rest, steps: &mut Steps) -> (u64, Option<Rest>) {
        self.note_change(); // blocks may stand elsewhere now, though none went
        self.store.cut(shared, cut, rest, steps)
    }

    /// Blocks of it were dropped where all share them. Returns how many that were.
    pub(crate) fn cut_shared(&mut self, dropped: &Tally) -> u64 {
        self.store.settle(dropped)
    }

    /// So many blocks were dropped. The engine still has them: what is left is `partial`.
    pub(crate) fn note_cut(&mut self, dropped: u64) {
        self.changes += 1;
        self.lost = true;
        self.removals.lose_some();
        self.counts.add_many(Counted::Capped, dropped);
    }

    /// No more are dropped for this time.
    pub(crate) fn end_cut(&mut self) {
        self.removals.end_loss();
    }

    /// The worker's state.
    #[must_use]
    pub fn describe(&self) -> Description {
        let totals = self.store.totals();
        Description {
            model: self.model.clone(),
            trust: self.trust(self.rules().as_deref()),
            block_size: self.block_size(),
            blocks: self.store.blocks() as u64,
            copies: totals.copies,
            doubtful: self.store.doubtful(),
            placed: totals.placed,
            guessed: totals.guessed,
            parked: self.parked.len() as u64,
            observed: self.runs.held() as u64,
            reannouncing: self.reannouncing(),
            suspended: self.suspended,
            counts: self.counts.clone(),
        }
    }
}
