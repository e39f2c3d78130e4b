//! The global index: workers by name and by model, each behind a lock of its own.
//!
//! * One writer may apply while any number of threads match. A worker is locked for one batch at a time, so a match sees
//!   each worker's batch wholly or not at all, and never waits for more than the one batch that is being applied.
//! * The registry's lock is held for no longer than it takes to find a worker or to share a list of them.
//! * What is asked of a worker that is not registered is ignored.

use std::sync::Arc;

use hashbrown::HashMap;
use parking_lot::{RwLock, RwLockWriteGuard};

use crate::event::{Adapter, ExtraKey};
use crate::key::{BlockKey, KeyChain};
use crate::worker::{Description, Facts, Match, Worker};

/// One worker of the index.
#[derive(Debug)]
pub struct Registered {
    name: String,
    model: String,
    worker: RwLock<Worker>,
}

impl Registered {
    /// The worker's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Change the worker. Who waits for it comes next, before the next batch.
    pub fn change(&self, change: impl FnOnce(&mut Worker)) {
        let mut worker = self.worker.write();
        change(&mut worker);
        let emptied = worker.take_emptied();
        RwLockWriteGuard::unlock_fair(worker);
        drop(emptied); // not under the lock
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
}

impl Index {
    /// An index without workers.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Register a worker, empty and trusted. Registering a known worker again makes it new.
    pub fn add_worker(&self, name: &str, model: &str, facts: Facts) {
        let worker = RwLock::new(Worker::new(model, facts));
        let added = Arc::new(Registered { name: name.to_owned(), model: model.to_owned(), worker });
        let mut registry = self.registry.write();
        let replaced = registry.remove(name);
        registry.by_name.insert(name.to_owned(), Arc::clone(&added));
        Arc::make_mut(registry.by_model.entry(model.to_owned()).or_default()).push(added);
        drop(registry);
        drop(replaced); // freeing what it held takes a while: not under the lock
    }

    /// Forget a worker and its registration.
    pub fn remove_worker(&self, name: &str) {
        let removed = self.registry.write().remove(name);
        drop(removed);
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

    /// What each worker of the prompt's model can do for it. Hashes once per distinct block size, as far as needed.
    #[must_use]
    pub fn lookup(&self, prompt: &Prompt<'_>) -> Vec<(Arc<Registered>, Match)> {
        let adapter = prompt.adapter.map_or(Adapter::None, |name| Adapter::Named(name.into()));
        let mut chains: HashMap<u32, KeyChain<'_>> = HashMap::new();
        let workers = self.workers_of(prompt.model);
        let mut found = Vec::with_capacity(workers.len());
        for registered in workers.iter() {
            let worker = registered.worker.read();
            let size = worker.block_size();
            let chain = (size > 0).then(|| {
                chains.entry(size).or_insert_with(|| {
                    KeyChain::new(BlockKey::root(prompt.model, &adapter, size), prompt.tokens, size, prompt.extra)
                })
            });
            found.push((Arc::clone(registered), worker.lookup(chain, prompt.tokens.len())));
        }
        found
    }

    /// Tokens per block of each worker of a model; 0 before its first store.
    #[must_use]
    pub fn block_sizes(&self, model: &str) -> Vec<(Arc<Registered>, u32)> {
        self.workers_of(model).iter().map(|worker| (Arc::clone(worker), worker.worker.read().block_size())).collect()
    }

    /// The state of every worker, by name.
    #[must_use]
    pub fn describe(&self) -> Vec<(String, Description)> {
        let workers: Vec<_> = self.registry.read().by_name.values().cloned().collect();
        workers.iter().map(|worker| (worker.name.clone(), worker.worker.read().describe())).collect()
    }
}
