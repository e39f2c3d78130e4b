//! What the index says, as Python objects.

use std::sync::Arc;

use kvsync_index::event::Tier;
use kvsync_index::{Description, Registered, Trust};
use pyo3::IntoPyObjectExt;
use pyo3::basic::CompareOp;
use pyo3::exceptions::PyKeyError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyIterator, PyNotImplemented, PyString, PyTuple};

/// What one worker can do for one prompt; equal to any object with equal attributes, whatever its `as_of`.
#[pyclass(frozen, module = "kvsync_core")]
pub(crate) struct Match(pub(crate) kvsync_index::Match);

#[pymethods]
impl Match {
    #[getter]
    fn credit(&self) -> u64 {
        self.0.credit
    }

    #[getter]
    fn expected(&self) -> u64 {
        self.0.expected
    }

    /// Tiers without tokens are absent.
    #[getter]
    fn by_tier<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let by_tier = PyDict::new(py);
        for (tier, tokens) in Tier::ALL.iter().zip(self.0.by_tier) {
            if tokens > 0 {
                by_tier.set_item(tier.word(), tokens)?;
            }
        }
        Ok(by_tier)
    }

    #[getter]
    fn trust(&self) -> &'static str {
        self.0.trust.word()
    }

    #[getter]
    fn as_of(&self) -> u64 {
        self.0.as_of
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let Self(found) = self;
        let by_tier = self.by_tier(py)?.repr()?;
        Ok(format!(
            "Match(credit={}, expected={}, by_tier={by_tier}, trust='{}', as_of={})",
            found.credit,
            found.expected,
            found.trust.word(),
            found.as_of
        ))
    }

    fn __richcmp__<'py>(&self, other: &Bound<'py, PyAny>, op: CompareOp) -> PyResult<Bound<'py, PyAny>> {
        let py = other.py();
        let not_implemented = || Ok(PyNotImplemented::get(py).to_owned().into_any());
        let equal = match (op, self.equals(other)?) {
            (CompareOp::Eq, Some(equal)) => equal,
            (CompareOp::Ne, Some(equal)) => !equal,
            _ => return not_implemented(),
        };
        equal.into_bound_py_any(py)
    }
}

impl Match {
    /// `None` when the other has not the attributes of a match.
    fn equals(&self, other: &Bound<'_, PyAny>) -> PyResult<Option<bool>> {
        let py = other.py();
        let ours = (self.credit(), self.expected(), self.by_tier(py)?, self.trust()).into_bound_py_any(py)?;
        let mut theirs = Vec::with_capacity(4);
        for name in ["credit", "expected", "by_tier", "trust"] {
            match other.getattr_opt(name)? {
                Some(value) => theirs.push(value),
                None => return Ok(None),
            }
        }
        ours.eq(PyTuple::new(py, theirs)?).map(Some)
    }
}

/// What an index says of one prompt, by worker. Objects are made of those rows only that somebody looks at: of a
/// thousand workers few hold anything of a prompt.
#[pyclass(frozen, mapping, module = "kvsync_core")]
pub(crate) struct Matches(pub(crate) Vec<(Arc<Registered>, kvsync_index::Match)>);

#[pymethods]
impl Matches {
    fn __len__(&self) -> usize {
        self.0.len()
    }

    fn __getitem__(&self, worker: &str) -> PyResult<Match> {
        self.find(worker).ok_or_else(|| PyKeyError::new_err(worker.to_owned()))
    }

    fn __contains__(&self, worker: &Bound<'_, PyAny>) -> bool {
        worker.extract::<&str>().is_ok_and(|worker| self.find(worker).is_some())
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyIterator>> {
        self.keys(py)?.try_iter()
    }

    #[pyo3(signature = (worker, default=None, /))]
    fn get<'py>(
        &self,
        py: Python<'py>,
        worker: &str,
        default: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.find(worker).map_or(Ok(default), |found| found.into_bound_py_any(py).map(Some))
    }

    fn keys<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.0.iter().map(|(worker, _)| name(py, worker)))
    }

    fn values(&self) -> Vec<Match> {
        self.0.iter().map(|(_, found)| Match(found.clone())).collect()
    }

    fn items<'py>(&self, py: Python<'py>) -> Vec<(Bound<'py, PyString>, Match)> {
        self.0.iter().map(|(worker, found)| (name(py, worker), Match(found.clone()))).collect()
    }

    /// Those that hold something of the prompt, or may.
    fn hits<'py>(&self, py: Python<'py>) -> Vec<(Bound<'py, PyString>, Match)> {
        let hit = |found: &kvsync_index::Match| found.credit > 0 || found.expected > 0;
        self.0
            .iter()
            .filter(|(_, found)| hit(found))
            .map(|(worker, found)| (name(py, worker), Match(found.clone())))
            .collect()
    }

    /// How far those can be trusted that can't be trusted to the full.
    fn doubts<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let doubts = PyDict::new(py);
        for (worker, found) in &self.0 {
            if found.trust != Trust::Exact {
                doubts.set_item(name(py, worker), found.trust.word())?;
            }
        }
        Ok(doubts)
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(self.dict(py)?.repr()?.to_string())
    }

    fn __richcmp__<'py>(&self, other: &Bound<'py, PyAny>, op: CompareOp) -> PyResult<Bound<'py, PyAny>> {
        let py = other.py();
        if !matches!(op, CompareOp::Eq | CompareOp::Ne) {
            return Ok(PyNotImplemented::get(py).to_owned().into_any());
        }
        match other.extract::<PyRef<'_, Self>>() {
            Ok(other) => self.dict(py)?.rich_compare(other.dict(py)?, op),
            Err(_) => self.dict(py)?.rich_compare(other, op),
        }
    }
}

impl Matches {
    fn find(&self, worker: &str) -> Option<Match> {
        self.0.iter().find(|(registered, _)| registered.name() == worker).map(|(_, found)| Match(found.clone()))
    }

    fn dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        for (worker, found) in &self.0 {
            dict.set_item(name(py, worker), Match(found.clone()))?;
        }
        Ok(dict)
    }
}

/// A worker's name, as one object for as long as it is registered: it is made, and hashed, once.
pub(crate) fn name<'py>(py: Python<'py>, worker: &Registered) -> Bound<'py, PyString> {
    let make = || PyString::intern(py, worker.name());
    worker.kept(|| make().unbind()).map_or_else(make, |name| name.bind(py).clone())
}

/// State per worker, and what was counted since it was added.
pub(crate) fn stats<'py>(
    py: Python<'py>,
    described: Vec<(String, Description)>,
    bytes: u64,
) -> PyResult<Bound<'py, PyDict>> {
    let workers = PyDict::new(py);
    for (name, worker) in described {
        let state = PyDict::new(py);
        state.set_item("model", worker.model)?;
        state.set_item("trust", worker.trust.word())?;
        state.set_item("block_size", worker.block_size)?;
        state.set_item("blocks", worker.blocks)?;
        state.set_item("copies", worker.copies)?;
        state.set_item("doubtful", worker.doubtful)?;
        state.set_item("placed", worker.placed)?;
        state.set_item("guessed", worker.guessed)?;
        state.set_item("parked", worker.parked)?;
        state.set_item("observed", worker.observed)?;
        state.set_item("reannouncing", worker.reannouncing)?;
        state.set_item("suspended", worker.suspended)?;
        let counts = PyDict::new(py);
        for (word, count) in worker.counts.iter() {
            counts.set_item(word, count)?;
        }
        state.set_item("counts", counts)?;
        workers.set_item(name, state)?;
    }
    let stats = PyDict::new(py);
    stats.set_item("implementation", "core")?;
    stats.set_item("bytes", bytes)?;
    stats.set_item("workers", workers)?;
    Ok(stats)
}
