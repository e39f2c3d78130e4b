//! `kvsync_core`: the native index for Python. It converts; every rule is in `kvsync-index`.
//!
//! * The face is that of `kvsync.index.match.Index`: same arguments, same exceptions, same answers.
//! * Applying runs without the GIL, all batches of a call at once. A lookup, and what an answer teaches, keep the GIL
//!   where that is short, because a short call that lets go of it may wait milliseconds to get it back.
//! * Event objects and extra keys are read by attribute: the package can be imported without `kvsync`.

mod answer;
mod buffer;
mod ids;
mod payload;
mod prompt;
#[cfg(target_os = "linux")]
mod receive;

use std::sync::Arc;

use kvsync_index::{Answer, Bounds, Facts, Index, Prompt, Shared, Worker};
use pyo3::exceptions::{PyOverflowError, PyValueError};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyBytes, PyDict};

use answer::Matches;
use payload::Work;

/// Nanoseconds of work from which a lookup lets go of the GIL.
const LONG: usize = 100_000;

/// The global prefix index; see `kvsync_core.pyi`.
#[pyclass(frozen, module = "kvsync_core")]
struct PrefixIndex {
    index: Arc<Index>,
}

#[pymethods]
impl PrefixIndex {
    #[new]
    #[pyo3(signature = (max_blocks=None, max_bytes=None))]
    fn new(max_blocks: Option<Bound<'_, PyAny>>, max_bytes: Option<Bound<'_, PyAny>>) -> PyResult<Self> {
        let bounds = Bounds { blocks: positive("max_blocks", max_blocks)?, bytes: positive("max_bytes", max_bytes)? };
        Ok(Self { index: Arc::new(Index::bounded(bounds)) })
    }

    #[pyo3(signature = (worker, model, *, usable_blocks=None, attention_chunk_size=None, spec_decode=None,
                        hit_alignment=None, rank=None))]
    #[expect(clippy::too_many_arguments, reason = "the face is given")]
    fn add_worker(
        &self,
        py: Python<'_>,
        worker: &str,
        model: &str,
        usable_blocks: Option<Bound<'_, PyAny>>,
        attention_chunk_size: Option<Bound<'_, PyAny>>,
        spec_decode: Option<&str>,
        hit_alignment: Option<Bound<'_, PyAny>>,
        rank: Option<i128>,
    ) -> PyResult<()> {
        let usable_blocks = positive("usable_blocks", usable_blocks)?;
        let attention_chunk_size = positive("attention_chunk_size", attention_chunk_size)?;
        let hit_alignment = positive("hit_alignment", hit_alignment)?;
        let eagle = match spec_decode {
            None => false,
            Some("eagle") => true,
            Some(other) => {
                return Err(PyValueError::new_err(format!(
                    "spec_decode must be None or 'eagle' (for EAGLE and MTP), not {other:?}"
                )));
            }
        };
        let facts = Facts { usable_blocks, attention_chunk_size, eagle, hit_alignment, rank };
        py.detach(|| self.index.add_worker(worker, model, facts));
        Ok(())
    }

    fn remove_worker(&self, py: Python<'_>, worker: &str) {
        py.detach(|| self.index.remove_worker(worker));
    }

    fn apply(&self, py: Python<'_>, worker: &str, payload: &Bound<'_, PyAny>) -> PyResult<()> {
        let mut work = Work::default();
        work.add(&self.index, worker, payload)?;
        py.detach(|| work.apply(&self.index));
        Ok(())
    }

    /// What precedes a batch that can't be taken is applied before the error is raised.
    fn apply_many(&self, py: Python<'_>, batches: &Bound<'_, PyAny>) -> PyResult<()> {
        let mut work = Work::default();
        let taken = work.add_all(&self.index, batches);
        py.detach(|| work.apply(&self.index));
        taken
    }

    #[cfg(target_os = "linux")]
    #[pyo3(signature = (library, call, *, pause, backlog, backlog_size))]
    fn receiver(
        &self,
        library: &str,
        call: i32,
        pause: f64,
        backlog: u64,
        backlog_size: u64,
    ) -> PyResult<receive::Receiver> {
        let limits = kvsync_receive::Limits { pause, messages: backlog, bytes: backlog_size };
        receive::Receiver::of(Arc::clone(&self.index), library, call, limits)
    }

    fn forget(&self, py: Python<'_>, worker: &str) {
        self.change(py, worker, Worker::forget);
    }

    fn new_epoch(&self, py: Python<'_>, worker: &str) {
        self.change(py, worker, Worker::new_epoch);
    }

    fn relearn(&self, py: Python<'_>, worker: &str) {
        self.change(py, worker, Worker::relearn);
    }

    fn suspend(&self, py: Python<'_>, worker: &str) {
        self.change(py, worker, |worker, _| worker.suspend());
    }

    fn resume(&self, py: Python<'_>, worker: &str) {
        self.change(py, worker, |worker, _| worker.resume());
    }

    fn mark_reannouncing(&self, py: Python<'_>, worker: &str) {
        py.detach(|| self.index.mark(worker, Worker::is_marked_reannouncing, Worker::mark_reannouncing));
    }

    fn mark_hidden_keys(&self, py: Python<'_>, worker: &str) {
        py.detach(|| self.index.mark(worker, Worker::is_marked_hidden_keys, Worker::mark_hidden_keys));
    }

    fn drops_last_block(&self, py: Python<'_>, worker: &str) {
        self.change(py, worker, |worker, _| worker.drops_last_block());
    }

    #[pyo3(signature = (worker, tokens, model, cached, credit, as_of, until, *, adapter=None, cache_salt=None,
                        block_keys=None))]
    #[expect(clippy::too_many_arguments, reason = "the face is given")]
    fn observe(
        &self,
        py: Python<'_>,
        worker: &str,
        tokens: &Bound<'_, PyAny>,
        model: &str,
        cached: &Bound<'_, PyAny>,
        credit: &Bound<'_, PyAny>,
        as_of: &Bound<'_, PyAny>,
        until: f64,
        adapter: Option<&str>,
        cache_salt: Option<&str>,
        block_keys: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<&'static str> {
        let tokens = prompt::tokens(tokens)?;
        let answer = Answer {
            cached: figure("cached", cached)?,
            credit: figure("credit", credit)?,
            as_of: moment(as_of)?,
            until: time("until", until)?,
        };
        let extra = prompt::extra_keys(block_keys, cache_salt)?;
        let prompt = Prompt { tokens: &tokens, model, adapter, extra: &extra, salted: cache_salt.is_some() };
        let observation = if self.index.lookup_time(model, tokens.len()) < LONG {
            self.index.observe(worker, &prompt, &answer)
        } else {
            py.detach(|| self.index.observe(worker, &prompt, &answer))
        };
        Ok(observation.word())
    }

    fn expire(&self, py: Python<'_>, now: f64) -> PyResult<()> {
        let now = time("now", now)?;
        py.detach(|| self.index.expire(now));
        Ok(())
    }

    #[pyo3(name = "match", signature = (tokens, model, *, adapter=None, cache_salt=None, block_keys=None))]
    fn lookup<'py>(
        &self,
        py: Python<'py>,
        tokens: &Bound<'py, PyAny>,
        model: &str,
        adapter: Option<&str>,
        cache_salt: Option<&str>,
        block_keys: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Matches> {
        let tokens = prompt::tokens(tokens)?;
        let extra = prompt::extra_keys(block_keys, cache_salt)?;
        let prompt = Prompt { tokens: &tokens, model, adapter, extra: &extra, salted: cache_salt.is_some() };
        let found = if self.index.lookup_time(model, tokens.len()) < LONG {
            self.index.lookup(&prompt)
        } else {
            py.detach(|| self.index.lookup(&prompt))
        };
        Ok(Matches(found))
    }

    fn block_sizes<'py>(&self, py: Python<'py>, model: &str) -> PyResult<Bound<'py, PyDict>> {
        let sizes = PyDict::new(py);
        for (worker, size) in self.index.block_sizes(model) {
            sizes.set_item(answer::name(py, &worker), size)?;
        }
        Ok(sizes)
    }

    fn dump<'py>(&self, py: Python<'py>, worker: &str) -> Option<Bound<'py, PyBytes>> {
        py.detach(|| self.index.dump(worker)).map(|image| PyBytes::new(py, &image))
    }

    fn restore(&self, py: Python<'_>, worker: &str, image: PyBackedBytes) -> PyResult<()> {
        let taken = py.detach(|| self.index.restore(worker, &image));
        taken.map_err(|error| PyValueError::new_err(error.to_string()))
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (described, bytes) = py.detach(|| (self.index.describe(), self.index.bytes()));
        answer::stats(py, described, bytes)
    }
}

impl PrefixIndex {
    fn change(&self, py: Python<'_>, worker: &str, change: impl Fn(&mut Worker, &mut Shared) + Send + Sync) {
        py.detach(|| self.index.change_named(worker, change));
    }
}

/// A fact that is at least 1; more than 64 bits hold is as good as no limit.
fn positive(name: &str, value: Option<Bound<'_, PyAny>>) -> PyResult<Option<u64>> {
    let Some(value) = value else {
        return Ok(None);
    };
    if value.lt(1)? {
        return Err(PyValueError::new_err(format!("{name} must be at least 1, not {value}")));
    }
    saturated(&value).map(Some)
}

/// Tokens; more than 64 bits hold are more than any prompt has.
fn figure(name: &str, value: &Bound<'_, PyAny>) -> PyResult<u64> {
    if value.lt(0)? {
        return Err(PyValueError::new_err(format!("{name} must be at least 0, not {value}")));
    }
    saturated(value)
}

/// A moment of an index. No number that does not come from one is a moment of this one.
fn moment(value: &Bound<'_, PyAny>) -> PyResult<u64> {
    if value.lt(0)? { Ok(0) } else { saturated(value) }
}

fn time(name: &str, value: f64) -> PyResult<f64> {
    if value.is_nan() { Err(PyValueError::new_err(format!("{name} must be a time, not NaN"))) } else { Ok(value) }
}

fn saturated(value: &Bound<'_, PyAny>) -> PyResult<u64> {
    match value.extract::<u64>() {
        Err(error) if error.is_instance_of::<PyOverflowError>(value.py()) => Ok(u64::MAX),
        extracted => extracted,
    }
}

/// The module.
#[pymodule]
mod kvsync_core {
    #[pymodule_export]
    use super::PrefixIndex;
    #[pymodule_export]
    use super::answer::{Match, Matches};
    #[pymodule_export]
    use super::ids::lift_ids;
    #[cfg(target_os = "linux")]
    #[pymodule_export]
    use super::receive::{Progress, Receiver, Report};
}
