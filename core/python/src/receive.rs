//! A receiver for Python: sockets by their addresses, reports as objects.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kvsync_index::Index;
use kvsync_receive::{Library, Limits};
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

/// What became of one stream; see `kvsync_core.pyi`.
#[pyclass(frozen, get_all, module = "kvsync_core")]
pub(crate) struct Report {
    stream: u64,
    count: u64,
    last: u64,
    times: Py<PyBytes>,
    seconds: f64,
    messages: u64,
    size: u64,
    emptied: bool,
    asks: bool,
    handed: Py<PyList>,
}

impl Report {
    fn new(py: Python<'_>, report: kvsync_receive::Report) -> PyResult<Self> {
        let (count, last, times) = report.tally.map_or_else(Default::default, |t| (t.count, t.last, t.times));
        let messages = report.handed.iter().map(|frames| PyList::new(py, frames.iter().map(|f| PyBytes::new(py, f))));
        Ok(Self {
            stream: report.stream,
            count,
            last,
            times: PyBytes::new(py, &times).unbind(),
            seconds: report.seconds,
            messages: report.messages,
            size: report.bytes,
            emptied: report.emptied,
            asks: report.asks,
            handed: PyList::new(py, messages.collect::<PyResult<Vec<_>>>()?)?.unbind(),
        })
    }
}

/// How far a receiver has come with a stream; see `kvsync_core.pyi`.
#[pyclass(frozen, module = "kvsync_core")]
pub(crate) struct Progress(kvsync_receive::Progress);

#[pymethods]
impl Progress {
    #[getter]
    fn count(&self) -> u64 {
        self.0.count()
    }
}

/// Reads ZeroMQ sockets without the GIL; see `kvsync_core.pyi`.
#[pyclass(frozen, module = "kvsync_core")]
pub(crate) struct Receiver {
    inner: Mutex<kvsync_receive::Receiver>,
}

impl Receiver {
    pub(crate) fn of(index: Arc<Index>, library: &str, call: i32, limits: Limits) -> PyResult<Self> {
        let library = Library::loaded_with(library).map_err(|unusable| PyOSError::new_err(unusable.to_string()))?;
        Ok(Self { inner: Mutex::new(kvsync_receive::Receiver::new(library, index, call, limits)?) })
    }

    fn with<T>(&self, work: impl FnOnce(&mut kvsync_receive::Receiver) -> T) -> T {
        work(&mut self.inner.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[pymethods]
impl Receiver {
    fn add(&self, stream: u64, socket: usize) -> PyResult<()> {
        let address = NonNull::new(socket as *mut c_void).ok_or_else(|| PyValueError::new_err("not a socket: 0"))?;
        // SAFETY: the face says that the address is an open socket's, that it is removed before it is closed, and that one
        // thread does all of it.
        self.with(|receiver| unsafe { receiver.add(stream, address) })?;
        Ok(())
    }

    fn remove(&self, socket: usize) {
        self.with(|receiver| receiver.remove(socket));
    }

    fn follow(&self, socket: usize, worker: &str, next: u64, at: f64) -> Option<Progress> {
        self.with(|receiver| receiver.follow(socket, worker, next, at)).map(Progress)
    }

    fn leave(&self, socket: usize) {
        self.with(|receiver| receiver.leave(socket));
    }

    fn wait(&self, py: Python<'_>, seconds: f64, messages: usize, size: usize) -> PyResult<Vec<Report>> {
        let patience = Duration::try_from_secs_f64(seconds).map_err(|e| PyValueError::new_err(e.to_string()))?;
        let reports = py.detach(|| self.with(|receiver| receiver.wait(patience, messages, size)));
        reports.into_iter().map(|report| Report::new(py, report)).collect()
    }
}
