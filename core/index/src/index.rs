//! The global index: workers by name and by model, each behind a lock of its own.
//!
//! * One writer may apply while any number of threads match. A worker is locked for one batch at a time, so a match sees
//!   each worker's batch wholly or not at all, and never waits for more than the one batch that is being applied.
//! * The registry's lock is held for no longer than it takes to find a worker or to share a list of them.
//! * What is asked of a worker that is not registered is ignored, and so is what was on its way to one that is removed.
//! * With a bound on all workers together, there is never more after a batch; what goes is said in `store::cut`.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use hashbrown::HashMap;
use parking_lot::{RwLock, RwLockWriteGuard};

use crate::event::{Adapter, ExtraKey};
use crate::key::{BlockKey, KeyChain};
use crate::store::Census;
use crate::worker::{Answer, Asked, Description, Facts, Match, Observation, Worker};

/// Registrations so far, of every index: what one index says of a moment is never taken for another's.
static REGISTRATIONS: AtomicU64 = AtomicU64::new(0);

/// One worker of the index.
#[derive(Debug)]
pub struct Registered {
    name: String,
    model: String,
    /// None once it is removed.
    worker: RwLock<Option<Worker>>,
}

impl Registered {
    /// The worker's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
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
    /// Its keys in blocks of this size.
    fn chain(&self, block_size: u32) -> KeyChain<'a> {
        let adapter = self.adapter.map_or(Adapter::None, |name| Adapter::Named(name.into()));
        KeyChain::new(BlockKey::root(self.model, &adapter, block_size), self.tokens, block_size, self.extra)
    }

    fn asked<'c>(&self, chain: &'c mut KeyChain<'a>) -> Asked<'c, 'a> {
        let has_keys = |(block, keys): (usize, &Vec<_>)| keys.len() > usize::from(block == 0 && self.salted);
        Asked {
            chain,
            tokens: self.tokens.len(),
            first_with_keys: self.extra.iter().enumerate().position(has_keys).unwrap_or(usize::MAX),
            named_keys: self.salted || self.adapter.is_some(),
        }
    }
}

type Workers = Arc<Vec<Arc<Registered>>>;

#[derive(Debug, Default)]
struct Registry {
    by_name: HashMap<String, Arc<Registered>>,
    /// In order of registration; never empty.
    by_model: HashMap<String, Workers>,
}

impl Registry {
    fn remove(&mut self, name: &str) -> Option<Arc<Registered>> {
        let removed = self.by_name.remove(name)?;
        if let Some(workers) = self.by_model.get_mut(&removed.model) {
            Arc::make_mut(workers).retain(|worker| !Arc::ptr_eq(worker, &removed));
            if workers.is_empty() {
                self.by_model.remove(&removed.model);
            }
        }
        Some(removed)
    }
}

/// See the module.
#[derive(Debug, Default)]
pub struct Index {
    registry: RwLock<Registry>,
    max_blocks: Option<u64>,
    /// Blocks of all registered workers.
    blocks: AtomicU64,
}

impl Index {
    /// An index without workers, and without a bound on them.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// An index whose workers together may have so many blocks, at least 1.
    #[must_use]
    pub fn with_max_blocks(max_blocks: u64) -> Self {
        Self { max_blocks: Some(max_blocks.max(1)), ..Self::default() }
    }

    /// Register a worker, empty and trusted. Registering a known worker again makes it new, but for its marks.
    pub fn add_worker(&self, name: &str, model: &str, facts: Facts) {
        let number = REGISTRATIONS.fetch_add(1, Ordering::Relaxed) + 1;
        let worker = RwLock::new(Some(Worker::new(model, facts, number)));
        let added = Arc::new(Registered { name: name.to_owned(), model: model.to_owned(), worker });
        let mut registry = self.registry.write();
        let replaced = registry.remove(name);
        registry.by_name.insert(name.to_owned(), Arc::clone(&added));
        Arc::make_mut(registry.by_model.entry(model.to_owned()).or_default()).push(Arc::clone(&added));
        drop(registry);
        if let Some(before) = replaced.and_then(|replaced| self.retire(&replaced)) {
            self.change(&added, |worker| worker.take_marks(&before));
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
        let worker = registered.worker.write().take()?;
        self.blocks.fetch_sub(worker.blocks(), Ordering::Relaxed);
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
        self.registry.read().by_model.get(model).cloned().unwrap_or_default()
    }

    /// Change a worker, by one batch at most. Who waits for it comes next, before the next batch.
    ///
    /// False when it is registered no longer: then nothing is changed.
    pub fn change(&self, registered: &Registered, change: impl FnOnce(&mut Worker)) -> bool {
        let mut guard = registered.worker.write();
        let Some(worker) = guard.as_mut() else {
            return false;
        };
        let before = worker.blocks();
        change(worker);
        let (after, emptied) = (worker.blocks(), worker.take_emptied());
        self.blocks.fetch_add(after.wrapping_sub(before), Ordering::Relaxed); // wraps where there are fewer now
        RwLockWriteGuard::unlock_fair(guard);
        drop(emptied); // not under the lock
        if let Some(most) = self.max_blocks {
            self.make_room(most);
        }
        true
    }

    /// Change a worker, or the one that takes its place meanwhile.
    pub fn change_named(&self, name: &str, change: impl Fn(&mut Worker)) {
        while let Some(worker) = self.worker(name)
            && !self.change(&worker, &change)
        {}
    }

    /// Drop blocks while there are more than `most`, until an eighth of that is free.
    fn make_room(&self, most: u64) {
        while self.blocks.load(Ordering::Relaxed) > most {
            let workers: Vec<_> = self.registry.read().by_name.values().cloned().collect();
            let mut census = Census::default();
            for registered in &workers {
                if let Some(worker) = registered.worker.read().as_ref() {
                    worker.census(&mut census);
                }
            }
            let cut = census.plan(most - most / 8);
            for registered in &workers {
                let mut guard = registered.worker.write();
                if let Some(worker) = guard.as_mut() {
                    self.blocks.fetch_sub(worker.cut(&cut), Ordering::Relaxed);
                }
                RwLockWriteGuard::unlock_fair(guard);
            }
        }
    }

    /// What each worker of the prompt's model can do for it. Hashes once per distinct block size, as far as needed.
    #[must_use]
    pub fn lookup(&self, prompt: &Prompt<'_>) -> Vec<(Arc<Registered>, Match)> {
        let mut chains: HashMap<u32, KeyChain<'_>> = HashMap::new();
        let workers = self.workers_of(prompt.model);
        let mut found = Vec::with_capacity(workers.len());
        for registered in workers.iter() {
            let guard = registered.worker.read();
            let Some(worker) = guard.as_ref() else {
                continue;
            };
            let size = worker.block_size();
            let chain = (size > 0).then(|| chains.entry(size).or_insert_with(|| prompt.chain(size)));
            let answer = worker.lookup(chain, prompt.tokens.len(), self.max_blocks.is_some());
            found.push((Arc::clone(registered), answer));
        }
        found
    }

    /// Take what an answer teaches of its worker, and say what became of the blocks that were credited to it.
    #[must_use]
    pub fn observe(&self, name: &str, prompt: &Prompt<'_>, answer: &Answer) -> Observation {
        let Some(registered) = self.worker(name).filter(|registered| registered.model == prompt.model) else {
            return Observation::Unknown;
        };
        let mut observation = Observation::Unknown;
        let mut learns = false;
        let mut size = 0;
        let mut chain = None;
        if let Some(worker) = registered.worker.read().as_ref() {
            size = worker.block_size();
            if size > 0 {
                // most answers teach nothing: no lookup has to wait for them
                let chain = chain.insert(prompt.chain(size));
                observation = worker.judge(&mut prompt.asked(chain), answer);
                learns = worker.learns();
            }
        }
        if let Some(chain) = chain.as_mut().filter(|_| learns) {
            self.change(&registered, |worker| {
                observation = match worker.block_size() {
                    0 => Observation::Unknown,
                    same if same == size => worker.observe(&mut prompt.asked(chain), answer),
                    other => worker.observe(&mut prompt.asked(&mut prompt.chain(other)), answer),
                };
            });
        }
        observation
    }

    /// End what answers taught for no longer than this.
    pub fn expire(&self, now: f64) {
        let workers: Vec<_> = self.registry.read().by_name.values().cloned().collect();
        for registered in workers {
            if registered.worker.read().as_ref().is_some_and(Worker::has_runs) {
                self.change(&registered, |worker| worker.expire(now));
            }
        }
    }

    /// Tokens per block of each worker of a model; 0 before its first store.
    #[must_use]
    pub fn block_sizes(&self, model: &str) -> Vec<(Arc<Registered>, u32)> {
        let size = |registered: &Arc<Registered>| {
            let size = registered.worker.read().as_ref()?.block_size();
            Some((Arc::clone(registered), size))
        };
        self.workers_of(model).iter().filter_map(size).collect()
    }

    /// The state of every worker, by name.
    #[must_use]
    pub fn describe(&self) -> Vec<(String, Description)> {
        let workers: Vec<_> = self.registry.read().by_name.values().cloned().collect();
        let state = |registered: &Arc<Registered>| {
            let state = registered.worker.read().as_ref()?.describe();
            Some((registered.name.clone(), state))
        };
        workers.iter().filter_map(state).collect()
    }
}
