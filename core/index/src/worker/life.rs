//! What becomes of a worker apart from its events: losses and new epochs, marks that requests leave, registrations.

use super::Worker;
use crate::adoption::Names;
use crate::counts::Counted;
use crate::observed::Runs;
use crate::parked::Parked;
use crate::shared::Shared;
use crate::steps::Steps;
use crate::store::Store;

/// What a worker held before it was emptied. Freeing it takes a while.
#[derive(Debug, Default)]
pub struct Emptied(Vec<(Store, Parked, Runs)>);

/// Has a request gone to the worker that makes its events say less? In ascending order.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Mark {
    #[default]
    Absent,
    /// And a batch came since.
    Settled,
    /// And no batch came since.
    Fresh,
}

impl Mark {
    pub(super) fn after_batch(self) -> Self {
        self.min(Self::Settled)
    }

    /// A request that no batch followed yet may have gone to the new process.
    fn after_epoch(self) -> Self {
        if self == Self::Fresh { Self::Settled } else { Self::Absent }
    }
}

#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Marks {
    /// A request that makes the engine announce its hits.
    pub reannouncing: Mark,
    /// A request with a salt or an image.
    pub hidden_keys: Mark,
}

impl Marks {
    pub(super) fn map(self, change: impl Fn(Mark) -> Mark) -> Self {
        Self { reannouncing: change(self.reannouncing), hidden_keys: change(self.hidden_keys) }
    }
}

impl Worker {
    /// A loss beyond repair: drop all that is known and go on as `partial`.
    pub fn forget(&mut self, shared: &mut Shared) {
        self.lose(shared);
        self.lost = true;
        self.counts.add(Counted::Forgotten);
    }

    /// Another process answers for this worker: drop all that is known, begin again as `exact`.
    pub fn new_epoch(&mut self, shared: &mut Shared) {
        self.begin(shared);
        self.marks = self.marks.map(Mark::after_epoch);
        self.counts.add(Counted::Epochs);
    }

    /// Its batches come again from this epoch's first one on: drop what is known, begin again as `exact`. It is the same
    /// process, so that marks stay.
    pub fn relearn(&mut self, shared: &mut Shared) {
        self.begin(shared);
        self.counts.add(Counted::Relearned);
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
        self.marks.reannouncing = Mark::Fresh;
    }

    /// A request with a salt or an image goes to this worker: if its dialect hides those, trust is `none`.
    pub fn mark_hidden_keys(&mut self) {
        self.marks.hidden_keys = Mark::Fresh;
    }

    /// Would [`Worker::mark_reannouncing`] change nothing?
    #[must_use]
    pub fn is_marked_reannouncing(&self) -> bool {
        self.marks.reannouncing == Mark::Fresh
    }

    /// Would [`Worker::mark_hidden_keys`] change nothing?
    #[must_use]
    pub fn is_marked_hidden_keys(&self) -> bool {
        self.marks.hidden_keys == Mark::Fresh
    }

    /// Go on giving back memory that blocks took. True when all is done.
    pub(crate) fn tidy(&mut self, steps: &mut Steps) -> bool {
        self.note_change(); // blocks may stand elsewhere now, though none went
        self.store.tidy(steps)
    }

    /// Is there nothing more to give back?
    pub(crate) fn is_tidy(&self) -> bool {
        self.store.is_tidy()
    }

    /// Does it hold anything by what answers showed?
    pub(crate) fn has_runs(&self) -> bool {
        !self.runs.is_empty()
    }

    /// End what answers taught for no longer than this.
    pub(crate) fn expire(&mut self, now: f64) {
        self.runs.expire(now);
    }

    /// Its answers show EAGLE or MTP speculative decoding.
    pub fn drops_last_block(&mut self) {
        self.facts.eagle = true;
    }

    /// The marks of another registration of the same worker are its own, too.
    pub(crate) fn take_marks(&mut self, other: &Self) {
        self.marks.reannouncing = self.marks.reannouncing.max(other.marks.reannouncing);
        self.marks.hidden_keys = self.marks.hidden_keys.max(other.marks.hidden_keys);
    }

    pub(super) fn clear(&mut self, shared: &mut Shared) {
        self.lose(shared);
        self.settle();
        self.counts.add(Counted::Cleared);
    }

    fn begin(&mut self, shared: &mut Shared) {
        self.groups.clear();
        self.hides_keys = false;
        self.shows_unknown_keys = false;
        self.lose(shared);
        self.settle();
    }

    /// All that is known of its blocks goes.
    fn lose(&mut self, shared: &mut Shared) {
        self.removals.lose();
        self.names = Names::default();
        let known = (self.store.empty(shared), std::mem::take(&mut self.parked), std::mem::take(&mut self.runs));
        if known.0.blocks() > 0 || !known.1.is_empty() || !known.2.is_empty() {
            self.emptied.0.push(known);
        }
    }

    /// It is registered no longer: all that it held goes.
    pub(crate) fn leave(&mut self, shared: &mut Shared) {
        self.lose(shared);
    }

    /// What was emptied since it was last taken, to be freed where nobody waits for it.
    pub fn take_emptied(&mut self) -> Emptied {
        std::mem::take(&mut self.emptied)
    }

    /// What is right again once all is told from the beginning.
    fn settle(&mut self) {
        self.lost = false;
        self.overfull = false;
    }

    pub(super) fn reannouncing(&self) -> bool {
        self.overfull || self.marks.reannouncing != Mark::Absent
    }
}
