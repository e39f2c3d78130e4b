//! The global index: workers by name and by model, those of one model behind one lock with the blocks that they share.
//!
//! * One writer may apply while any number of threads match. A model is locked for one batch at a time, so a match sees
//!   each worker's batch wholly or not at all, and waits for no more than the one batch that is being applied. What takes
//!   longer, sweeping and making room, is done in steps; between them everything that holds of a model holds.
//! * The registry's lock is held for no longer than it takes to find a worker or to share a list of them; nobody waits for
//!   a model under it.
//! * What is asked of a worker that is not registered is ignored, and so is what was on its way to one that is removed.
//! * With a bound on the blocks of all workers together, there are never more after a batch; what goes is said in
//!   `store::cut`. One thread makes room at a time, and all that bring too much wait for it, so that it ends; what brings
//!   nothing, as an answer or a mark, neither waits for it nor makes any: requests do that. A bound on bytes is looked
//!   after each time that batches may have brought so much that it matters.

mod snapshot;

use std::any::Any;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use hashbrown::HashMap;
use parking_lot::{Mutex, RwLock, RwLockWriteGuard};

use crate::event::{Adapter, ExtraKey};
use crate::key::{BlockKey, KeyChain};
use crate::shared::{Shared, Walk};
use crate::steps::Steps;
use crate::store::{Census, Cut, Rest};
use crate::trail::Trail;
use crate::worker::{Answer, Asked, Description, Facts, Match, Observation, Worker};

/// Registrations so far, of every index: what one index says of a moment is never taken for another's.
static REGISTRATIONS: AtomicU64 = AtomicU64::new(0);

/// Steps under one lock, of making room and of sweeping (where one takes longer): it is held for a fraction of a
/// millisecond.
const STEPS: usize = 16_384;
const STEPS_OF_SWEEPING: usize = 4_096;
/// Steps of sweeping after each batch, beside those for what the batch brought.
const STEPS_PER_BATCH: usize = 512;

/// How many blocks may come until bytes are counted again; fewer under a small bound, so that they don't take all that
/// is left below it. A batch counts for some, whatever it brings.
const COUNT_AFTER: u64 = 16_384;
const COUNT_AFTER_LEAST: u64 = 1_024;
const BATCH_COUNTS_FOR: u64 = 64;
/// Bytes are near their bound when less than this part of it is left.
const NEAR: u64 = 16;

/// What all workers together may take.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Bounds {
    /// Blocks, at least 1.
    pub blocks: Option<u64>,
    /// Bytes of memory for blocks; what waits for its parent and what answers showed have bounds of their own.
    pub bytes: Option<u64>,
}

/// What the lock of a model guards.
#[derive(Debug, Default)]
struct Body {
    /// By registration.
    workers: HashMap<u64, Worker>,
    shared: Shared,
}

/// One model.
#[derive(Debug)]
struct Model {
    name: String,
    body: RwLock<Body>,
    /// Workers that a lookup has to ask block by block.
    slow: AtomicUsize,
}

impl Model {
    fn new(name: &str) -> Self {
        Self { name: name.to_owned(), body: RwLock::default(), slow: AtomicUsize::new(0) }
    }

    fn registrations(&self) -> Vec<u64> {
        self.body.read().workers.keys().copied().collect()
    }

    /// Count all blocks in, about: in steps, since behind a writer that waits for a long look all lookups would wait.
    fn census(&self, census: &mut Census) {
        let mut walk = Walk::START;
        while !walk.is_over() {
            self.body.read().shared.census(census, &mut walk, &mut Steps::new(STEPS));
            census.count();
        }
        for registration in self.registrations() {
            let mut rest = Some(0);
            while let Some(from) = rest {
                let body = self.body.read();
                rest = body
                    .workers
                    .get(&registration)
                    .and_then(|worker| worker.census(&body.shared, census, from, &mut Steps::new(STEPS)));
                drop(body);
                census.count();
            }
        }
    }

    /// Of a worker that was changed.
    fn recount(&self, worker: &mut Worker) {
        match worker.becomes_slow() {
            Some(true) => drop(self.slow.fetch_add(1, Ordering::Relaxed)),
            Some(false) => drop(self.slow.fetch_sub(1, Ordering::Relaxed)),
            None => {}
        }
    }
}

/// One worker of the index.
#[derive(Debug)]
pub struct Registered {
    name: String,
    model: Arc<Model>,
    /// Its number among all of every index.
    registration: u64,
    kept: OnceLock<Box<dyn Any + Send + Sync>>,
}

impl Registered {
    /// What the user of the index keeps with it: made at the first call, the same ever after.
    ///
    /// `None` for another type than that of the first call.
    pub fn kept<T: Any + Send + Sync>(&self, make: impl FnOnce() -> T) -> Option<&T> {
        self.kept.get_or_init(|| Box::new(make())).downcast_ref()
    }

    /// The worker's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// `None` once it is removed.
    fn worker<'b>(&self, body: &'b Body) -> Option<&'b Worker> {
        body.workers.get(&self.registration)
    }
}

/// A prompt to be looked up.
#[derive(Debug, Clone, Copy)]
pub struct Prompt<'a> {
    /// Its tokens.
    pub tokens: &'a [u32],
    /// The model that is to answer.
    pub model: &'a str,
    /// The adapter, by name.
    pub adapter: Option<&'a str>,
    /// Extra keys by block number; blocks beyond the end have none.
    pub extra: &'a [Vec<ExtraKey<'a>>],
    /// The last one of the first block is the request's cache salt.
    pub salted: bool,
}

impl<'a> Prompt<'a> {
    /// Along its keys in blocks of this size.
    fn trail(&self, block_size: u32) -> Trail<'a> {
        let adapter = self.adapter.map_or(Adapter::None, |name| Adapter::Named(name.into()));
        let root = BlockKey::root(self.model, &adapter, block_size);
        Trail::new(KeyChain::new(root, self.tokens, block_size, self.extra))
    }

    fn asked<'c>(&self, trail: &'c mut Trail<'a>) -> Asked<'c, 'a> {
        let has_keys = |(block, keys): (usize, &Vec<_>)| keys.len() > usize::from(block == 0 && self.salted);
        Asked {
            trail,
            tokens: self.tokens.len(),
            first_with_keys: self.extra.iter().enumerate().position(has_keys).unwrap_or(usize::MAX),
            named_keys: self.salted || self.adapter.is_some(),
        }
    }
}

/// In order of registration.
type Workers = Arc<Vec<Arc<Registered>>>;

/// A model of that name was registered meanwhile.
struct OtherModel;

#[derive(Debug, Default)]
struct Registry {
    by_name: HashMap<String, Arc<Registered>>,
    /// None is without workers.
    by_model: HashMap<String, (Arc<Model>, Workers)>,
}

impl Registry {
    /// The model of this name, or one that is not here yet.
    fn model(&self, name: &str) -> Arc<Model> {
        self.by_model.get(name).map_or_else(|| Arc::new(Model::new(name)), |(model, _)| Arc::clone(model))
    }

    /// Add a worker whose model is here or can be, in the place of the one of its name if there is one.
    fn add(&mut self, added: &Arc<Registered>) -> Result<Option<Arc<Registered>>, OtherModel> {
        let model = &added.model;
        if self.by_model.get(&model.name).is_some_and(|(here, _)| !Arc::ptr_eq(here, model)) {
            return Err(OtherModel);
        }
        let replaced = self.remove(&added.name);
        let new = || (Arc::clone(model), Workers::default());
        let (_, workers) = self.by_model.entry(model.name.clone()).or_insert_with(new);
        Arc::make_mut(workers).push(Arc::clone(added));
        self.by_name.insert(added.name.clone(), Arc::clone(added));
        Ok(replaced)
    }

    fn remove(&mut self, name: &str) -> Option<Arc<Registered>> {
        let removed = self.by_name.remove(name)?;
        if let Some((_, workers)) = self.by_model.get_mut(&removed.model.name) {
            Arc::make_mut(workers).retain(|worker| !Arc::ptr_eq(worker, &removed));
            if workers.is_empty() {
                self.by_model.remove(&removed.model.name);
            }
        }
        Some(removed)
    }
}

/// See the module.
#[derive(Debug, Default)]
pub struct Index {
    registry: RwLock<Registry>,
    bounds: Bounds,
    /// Blocks of all registered workers.
    blocks: AtomicU64,
    /// Blocks that came since bytes were counted.
    uncounted: AtomicU64,
    /// The most blocks that were there while bytes were near their bound.
    full: AtomicU64,
    making_room: Mutex<()>,
}

impl Index {
    /// An index without workers, and without a bound on them.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// An index whose workers together may take no more than this.
    #[must_use]
    pub fn bounded(bounds: Bounds) -> Self {
        Self { bounds, ..Self::default() }
    }

    /// Register a worker, empty and trusted. Registering a known worker again makes it new, but for its marks.
    pub fn add_worker(&self, name: &str, model: &str, facts: Facts) {
        let registration = REGISTRATIONS.fetch_add(1, Ordering::Relaxed) + 1;
        let mut worker = Worker::new(model, facts, registration);
        let replaced = loop {
            let model = self.registry.read().model(model);
            // waits for the model, so not under the registry's lock; nobody finds the worker before it stands there
            model.body.write().workers.insert(registration, worker);
            let added = Arc::new(Registered { name: name.to_owned(), model, registration, kept: OnceLock::new() });
            let replaced = self.registry.write().add(&added);
            match replaced {
                Ok(replaced) => break replaced,
                Err(OtherModel) => {
                    let taken_back = added.model.body.write().workers.remove(&registration);
                    worker = taken_back.expect("nobody else knows of it");
                }
            }
        };
        if let Some(before) = replaced.and_then(|replaced| self.retire(&replaced)) {
            // it may be replaced by now itself, as one without marks
            self.change_named(name, |worker, _| worker.take_marks(&before));
        }
    }

    /// Forget a worker and its registration.
    pub fn remove_worker(&self, name: &str) {
        let removed = self.registry.write().remove(name);
        if let Some(removed) = removed {
            drop(self.retire(&removed)); // freeing what it held takes a while: not under a lock
        }
    }

    /// Take the worker out of a registration that is in the registry no longer.
    fn retire(&self, registered: &Registered) -> Option<Worker> {
        let mut body = registered.model.body.write();
        let Body { workers, shared } = &mut *body;
        let mut worker = workers.remove(&registered.registration)?;
        self.blocks.fetch_sub(worker.blocks(), Ordering::Relaxed);
        worker.leave(shared);
        registered.model.recount(&mut worker);
        Some(worker)
    }

    /// A registered worker.
    #[must_use]
    pub fn worker(&self, name: &str) -> Option<Arc<Registered>> {
        self.registry.read().by_name.get(name).cloned()
    }

    /// The workers that serve a model.
    #[must_use]
    pub fn workers_of(&self, model: &str) -> Workers {
        self.registry.read().by_model.get(model).map(|(_, workers)| Arc::clone(workers)).unwrap_or_default()
    }

    /// Change a worker, by one batch at most. Who waits for it comes next, before the next batch.
    ///
    /// False when it is registered no longer: then nothing is changed.
    pub fn change(&self, registered: &Registered, change: impl FnOnce(&mut Worker, &mut Shared)) -> bool {
        let mut guard = registered.model.body.write();
        let Body { workers, shared } = &mut *guard;
        let Some(worker) = workers.get_mut(&registered.registration) else {
            return false;
        };
        let (before, batches) = (worker.blocks(), worker.batches());
        change(worker, shared);
        worker.note_change();
        registered.model.recount(worker);
        let brings = worker.batches() > batches;
        let (after, emptied) = (worker.blocks(), worker.take_emptied());
        shared.sweep(Steps::new(STEPS_PER_BATCH + 4 * after.saturating_sub(before) as usize));
        self.blocks.fetch_add(after.wrapping_sub(before), Ordering::Relaxed); // wraps where there are fewer now
        RwLockWriteGuard::unlock_fair(guard);
        drop(emptied); // not under the lock
        if brings {
            self.keep_bounds(after.saturating_sub(before));
        }
        true
    }

    /// Change a worker, or the one that takes its place meanwhile.
    pub fn change_named(&self, name: &str, change: impl Fn(&mut Worker, &mut Shared)) {
        while let Some(worker) = self.worker(name)
            && !self.change(&worker, &change)
        {}
    }

    /// Mark a worker, or the one that takes its place meanwhile. Where it `has` the mark, nothing changes and nobody waits:
    /// requests do this, and most find it done.
    pub fn mark(&self, name: &str, has: impl Fn(&Worker) -> bool, mark: impl Fn(&mut Worker)) {
        let marked = |registered: Arc<Registered>| registered.worker(&registered.model.body.read()).is_some_and(&has);
        if !self.worker(name).is_some_and(marked) {
            self.change_named(name, |worker, _| mark(worker));
        }
    }

    fn models(&self) -> Vec<Arc<Model>> {
        self.registry.read().by_model.values().map(|(model, _)| Arc::clone(model)).collect()
    }

    /// A batch brought so many blocks more.
    fn keep_bounds(&self, more: u64) {
        let blocks = || self.blocks.load(Ordering::Relaxed);
        if let Some(most) = self.bounds.blocks
            && more > 0
            && blocks() > most
        {
            self.make_room_while(|| (blocks() > most).then_some(most - most / 8));
        }
        if let Some(most) = self.bounds.bytes {
            let more = more + BATCH_COUNTS_FOR;
            if self.uncounted.fetch_add(more, Ordering::Relaxed) + more
                > (most >> 12).clamp(COUNT_AFTER_LEAST, COUNT_AFTER)
            {
                self.uncounted.store(0, Ordering::Relaxed);
                self.keep_bytes(most);
            }
        }
    }

    /// Keep the bound on bytes. Of what is dropped hardly any memory comes back at once (a page does when all in it is
    /// gone), but it serves for what comes next. So room is made a little below the bound, each time that about as many
    /// blocks are there again; fewer, the nearer the bound is. Where memory grows beyond it all the same, by blocks of
    /// another kind, there is no other way than to drop until enough of it has come back.
    fn keep_bytes(&self, most: u64) {
        let blocks = || self.blocks.load(Ordering::Relaxed);
        let bytes = || self.bytes_of(Worker::block_bytes);
        let less = || blocks() - blocks().div_ceil(8);
        let (now, taken) = (blocks(), bytes());
        if taken > most {
            self.make_room_while(|| (blocks() > 0 && bytes() > most).then(less));
        } else if taken > most - most / NEAR && now > 0 {
            let full = self.full.fetch_max(now, Ordering::Relaxed).max(now);
            let left = (most - taken) as f64 * NEAR as f64 / most as f64;
            if now as f64 >= full as f64 * left {
                self.make_room_while(|| (blocks() >= now).then(less));
            }
        }
    }

    /// Make room for as long as there is a number of blocks to go down to; one thread at a time.
    fn make_room_while(&self, target: impl Fn() -> Option<u64>) {
        let _one_at_a_time = self.making_room.lock();
        let mut reads = true;
        while let Some(target) = target() {
            self.make_room(target, reads);
            // lookups may find the blocks that are to go faster than those go: so this ends, whatever they do
            reads = self.blocks.load(Ordering::Relaxed) <= target;
        }
    }

    /// Bytes of memory that all of it takes, about.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes_of(Worker::bytes)
    }

    fn bytes_of(&self, of_worker: fn(&Worker) -> usize) -> u64 {
        let bytes = |model: Arc<Model>| {
            let body = model.body.read();
            body.shared.bytes() + body.workers.values().map(of_worker).sum::<usize>()
        };
        self.models().into_iter().map(bytes).sum::<usize>() as u64
    }

    /// Drop blocks until there are about `target` at most; of those that lookups find meanwhile perhaps none, if `reads`
    /// count.
    fn make_room(&self, target: u64, reads: bool) {
        let mut census = if reads { Census::default() } else { Census::blind() };
        let models = self.models();
        models.iter().for_each(|model| model.census(&mut census));
        let cut = census.plan(target);
        models.iter().for_each(|model| self.cut(model, &cut));
    }

    /// Drop the blocks of these classes in steps, each of which takes whole blocks; see `store::cut`. What is read is
    /// forgotten last, where the entries are gone through.
    fn cut(&self, model: &Model, cut: &Cut) {
        let workers = model.registrations();
        for registration in workers {
            let mut rest = Some(Rest::ALL);
            while let Some(from) = rest {
                let mut guard = model.body.write();
                let Body { workers, shared } = &mut *guard;
                rest = workers.get_mut(&registration).and_then(|worker| {
                    let (dropped, rest) = worker.cut(shared, cut, from, &mut Steps::new(STEPS));
                    self.note_cut(model, worker, dropped);
                    rest
                });
                RwLockWriteGuard::unlock_fair(guard);
            }
        }
        let mut walk = Walk::START;
        while !walk.is_over() {
            let mut guard = model.body.write();
            let Body { workers, shared } = &mut *guard;
            let tally = shared.cut(cut, &mut walk, &mut Steps::new(STEPS));
            for worker in workers.values_mut() {
                let dropped = worker.cut_shared(&tally);
                self.note_cut(model, worker, dropped);
                if walk.is_over() {
                    worker.end_cut();
                }
            }
            RwLockWriteGuard::unlock_fair(guard);
        }
    }

    fn note_cut(&self, model: &Model, worker: &mut Worker, dropped: u64) {
        if dropped > 0 {
            self.blocks.fetch_sub(dropped, Ordering::Relaxed);
            worker.note_cut(dropped);
            model.recount(worker);
        }
    }

    /// What a lookup of so many tokens takes at most, in nanoseconds, on a slow machine: more than it mostly does.
    #[must_use]
    pub fn lookup_time(&self, model: &str, tokens: usize) -> usize {
        let registry = self.registry.read();
        let Some((model, workers)) = registry.by_model.get(model) else {
            return 0;
        };
        // a block costs about 15 ns to find, whatever holds it, and as much for each worker that is asked for it
        let slow = model.slow.load(Ordering::Relaxed);
        tokens.saturating_mul(1 + slow).saturating_add(150 * workers.len())
    }

    /// What each worker of the prompt's model can do for it. Hashes once per distinct block size, as far as needed.
    #[must_use]
    pub fn lookup(&self, prompt: &Prompt<'_>) -> Vec<(Arc<Registered>, Match)> {
        let mut trails: HashMap<u32, (Trail<'_>, u64)> = HashMap::new();
        let workers = self.workers_of(prompt.model);
        let mut found = Vec::with_capacity(workers.len());
        let Some(first) = workers.first() else {
            return found;
        };
        let body = first.model.body.read();
        for registered in workers.iter() {
            let Some(worker) = registered.worker(&body) else {
                continue;
            };
            let size = worker.block_size();
            let mut way = (size > 0).then(|| trails.entry(size).or_insert_with(|| (prompt.trail(size), 0)));
            let answer = worker.lookup(&body.shared, way.as_mut().map(|(trail, _)| trail), prompt.tokens.len());
            if let Some((_, longest)) = way {
                *longest = (*longest).max((answer.credit + answer.expected) / u64::from(size));
            }
            found.push((Arc::clone(registered), answer));
        }
        if self.bounds != Bounds::default() {
            for (trail, longest) in trails.values_mut() {
                trail.note_reads(&body.shared, *longest as usize);
            }
        }
        found
    }

    /// Take what an answer teaches of its worker, and say what became of the blocks that were credited to it.
    #[must_use]
    pub fn observe(&self, name: &str, prompt: &Prompt<'_>, answer: &Answer) -> Observation {
        let Some(registered) = self.worker(name).filter(|registered| registered.model.name == prompt.model) else {
            return Observation::Unknown;
        };
        let mut observation = Observation::Unknown;
        let mut learns = false;
        let mut size = 0;
        let mut trail = None;
        if let Some(worker) = registered.worker(&registered.model.body.read()) {
            size = worker.block_size();
            if size > 0 {
                // most answers teach nothing: no lookup has to wait for them
                let trail = trail.insert(prompt.trail(size));
                observation = worker.judge(&mut prompt.asked(trail), answer);
                learns = worker.learns();
            }
        }
        if let Some(trail) = trail.as_mut().filter(|_| learns) {
            trail.restart();
            self.change(&registered, |worker, shared| {
                observation = match worker.block_size() {
                    0 => Observation::Unknown,
                    same if same == size => worker.observe(shared, &mut prompt.asked(trail), answer),
                    other => worker.observe(shared, &mut prompt.asked(&mut prompt.trail(other)), answer),
                };
            });
        }
        observation
    }

    /// End what answers taught for no longer than this, and go on giving back what workers held that lost all, or most.
    pub fn expire(&self, now: f64) {
        let workers: Vec<_> = self.registry.read().by_name.values().cloned().collect();
        for registered in workers {
            let has_runs = registered.worker(&registered.model.body.read()).is_some_and(Worker::has_runs);
            if has_runs {
                self.change(&registered, |worker, _| worker.expire(now));
            }
            let mut tidy = registered.worker(&registered.model.body.read()).is_none_or(Worker::is_tidy);
            while !tidy {
                let mut guard = registered.model.body.write();
                let worker = guard.workers.get_mut(&registered.registration);
                tidy = worker.is_none_or(|worker| worker.tidy(&mut Steps::new(STEPS_OF_SWEEPING)));
                RwLockWriteGuard::unlock_fair(guard);
            }
        }
        for model in self.models() {
            let mut swept = model.body.read().shared.is_swept();
            while !swept {
                let mut guard = model.body.write();
                guard.shared.sweep(Steps::new(STEPS_OF_SWEEPING));
                swept = guard.shared.is_swept();
                RwLockWriteGuard::unlock_fair(guard);
            }
        }
    }

    /// Tokens per block of each worker of a model; 0 before its first store.
    #[must_use]
    pub fn block_sizes(&self, model: &str) -> Vec<(Arc<Registered>, u32)> {
        let size = |registered: &Arc<Registered>| {
            let size = registered.worker(&registered.model.body.read())?.block_size();
            Some((Arc::clone(registered), size))
        };
        self.workers_of(model).iter().filter_map(size).collect()
    }

    /// The state of every worker, by name.
    #[must_use]
    pub fn describe(&self) -> Vec<(String, Description)> {
        let workers: Vec<_> = self.registry.read().by_name.values().cloned().collect();
        let state = |registered: &Arc<Registered>| {
            let state = registered.worker(&registered.model.body.read())?.describe();
            Some((registered.name.clone(), state))
        };
        workers.iter().filter_map(state).collect()
    }
}
