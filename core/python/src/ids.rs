//! Prompts of token ids out of JSON, for Python.

use kvsync_index::ids::lift;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyBytes, PyList};

/// Bytes of JSON from which reading lets go of the GIL: about 50 µs of work.
const LONG_TEXT: usize = 64 << 10;

/// See `kvsync_core.pyi`.
#[pyfunction]
#[pyo3(signature = (text, member, most=1))]
pub(crate) fn lift_ids<'py>(
    text: &Bound<'py, PyBytes>,
    member: &str,
    most: usize,
) -> PyResult<Option<(Bound<'py, PyBytes>, Bound<'py, PyList>)>> {
    let py = text.py();
    let lifted = if text.as_bytes().len() < LONG_TEXT {
        lift(text.as_bytes(), member, most)
    } else {
        let held = PyBackedBytes::from(text.clone());
        py.detach(|| lift(&held, member, most))
    };
    let Some(lifted) = lifted else {
        return Ok(None);
    };
    let text = text.as_bytes();
    let rest = [&text[..lifted.place.start], b"[]", &text[lifted.place.end..]].concat();
    let prompts = lifted.prompts.iter().map(|ids| PyBytes::new(py, bytemuck::cast_slice(ids)));
    Ok(Some((PyBytes::new(py, &rest), PyList::new(py, prompts)?)))
}
