//! What is to be applied: payloads are held (bytes) or copied (other buffers), event objects converted, while the GIL is
//! there; then all is applied without it.

use std::sync::Arc;

use kvsync_index::event::{Adapter, EngineHash, Event, Removed, Run, SkipReason, Stored, Tier};
use kvsync_index::hits::Kind;
use kvsync_index::wire::MAX_GROUPS;
use kvsync_index::{Index, Registered};
use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::{PyOverflowError, PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::pybacked::{PyBackedBytes, PyBackedStr};
use pyo3::types::{PyBytes, PyInt, PyString};

use crate::{buffer, prompt};

enum Payload {
    Held(PyBackedBytes),
    Copied(Vec<u8>),
    Decoded { rank: Option<i128>, events: Vec<Event<'static>> },
}

/// Payloads and the workers that they are for, in order.
#[derive(Default)]
pub(crate) struct Work {
    items: Vec<(Arc<Registered>, Payload)>,
}

impl Work {
    /// Take one; for a worker that is not registered it is ignored.
    pub(crate) fn add(&mut self, index: &Index, worker: &str, payload: &Bound<'_, PyAny>) -> PyResult<()> {
        if let Some(worker) = index.worker(worker) {
            self.items.push((worker, Payload::new(payload)?));
        }
        Ok(())
    }

    /// Take all of an iterable of (worker, payload).
    pub(crate) fn add_all(&mut self, index: &Index, batches: &Bound<'_, PyAny>) -> PyResult<()> {
        for item in batches.try_iter()? {
            let (worker, payload): (PyBackedStr, Bound<'_, PyAny>) = item?.extract()?;
            self.add(index, &worker, &payload)?;
        }
        Ok(())
    }

    /// Apply all that was taken, each worker locked for one batch at a time.
    pub(crate) fn apply(&mut self, index: &Index) {
        for (worker, payload) in &mut self.items {
            index.change(worker, |worker, shared| match payload {
                Payload::Held(bytes) => worker.apply_payload(shared, bytes),
                Payload::Copied(bytes) => worker.apply_payload(shared, bytes),
                Payload::Decoded { rank, events } => worker.apply(shared, *rank, events.drain(..)),
            });
        }
    }
}

impl Payload {
    fn new(given: &Bound<'_, PyAny>) -> PyResult<Self> {
        if let Ok(bytes) = given.cast::<PyBytes>() {
            return Ok(Self::Held(bytes.clone().into()));
        }
        if let Some(events) = given.getattr_opt(intern!(given.py(), "events"))? {
            let rank = given.getattr(intern!(given.py(), "data_parallel_rank"))?.extract()?;
            let events = events.try_iter()?.map(|item| event(&item?)).collect::<PyResult<_>>()?;
            return Ok(Self::Decoded { rank, events });
        }
        let buffer = PyUntypedBuffer::get(given)?;
        if !buffer.is_c_contiguous() {
            return Err(PyTypeError::new_err("a payload must be a contiguous buffer"));
        }
        Ok(Self::Copied(buffer::copied(&buffer, given.py())))
    }
}

/// An event object of `kvsync.events.types`, told apart by the attributes that only its class has.
fn event(given: &Bound<'_, PyAny>) -> PyResult<Event<'static>> {
    let py = given.py();
    if given.hasattr(intern!(py, "raw_token_ids"))? {
        return stored(given).map(Event::Stored);
    }
    if given.hasattr(intern!(py, "remaining_copy_counts"))? {
        return removed(given).map(Event::Removed);
    }
    if let Some(may_remove) = given.getattr_opt(intern!(py, "may_remove"))? {
        let word: String = field(given, "reason")?;
        let reason = SkipReason::ALL.into_iter().find(|reason| reason.word() == word);
        let reason = reason.ok_or_else(|| PyValueError::new_err(format!("not a reason to skip an event: {word:?}")))?;
        return Ok(Event::Skipped { reason, may_remove: may_remove.is_truthy()? });
    }
    if given.get_type().name()? == "AllBlocksClearedEvent" {
        return Ok(Event::Cleared);
    }
    Err(PyTypeError::new_err(format!("not an event: {}", given.repr()?)))
}

fn stored(event: &Bound<'_, PyAny>) -> PyResult<Stored<'static>> {
    let tokens: Vec<u8> = field(event, "raw_token_ids")?;
    let (tokens, rest) = tokens.as_chunks::<4>();
    if !rest.is_empty() {
        return Err(PyValueError::new_err("raw_token_ids must hold 4 bytes per token"));
    }
    let block_size: u32 = field(event, "block_size")?;
    if block_size >= 1 << 31 {
        return Err(PyOverflowError::new_err("block_size must be below 2**31"));
    }
    let hashes = hashes(event)?;
    let parent = match event.getattr("parent_block_hash")? {
        none if none.is_none() => None,
        parent => Some(hash(&parent)?),
    };
    let extra_keys = match event.getattr("extra_keys")? {
        none if none.is_none() => None,
        blocks => {
            let blocks = blocks.try_iter()?.map(|keys| prompt::extra_keys_of_block(&keys?));
            Some(blocks.collect::<PyResult<Vec<_>>>()?)
        }
    };
    if extra_keys.as_ref().is_some_and(|blocks| blocks.len() != hashes.len()) {
        return Err(PyValueError::new_err("extra_keys must have one item per block"));
    }
    let lora_name: Option<String> = field(event, "lora_name")?;
    let medium: Option<String> = field(event, "medium")?;
    let group = group(event)?;
    let kind: Option<String> = field(event, "kv_cache_spec_kind")?;
    Ok(Stored {
        run: Run {
            hashes,
            parent,
            tokens: tokens.iter().map(|token| u32::from_be_bytes(*token)).collect(),
            block_size,
            adapter: Adapter::new(lora_name.map(Into::into), field(event, "lora_id")?),
            extra_keys,
        },
        tier: Tier::of_medium(medium.as_deref()),
        group: group.unwrap_or(0),
        kind: kind.as_deref().map(Kind::of_spec),
        window: field(event, "kv_cache_spec_sliding_window")?,
    })
}

fn removed(event: &Bound<'_, PyAny>) -> PyResult<Removed<'static>> {
    let hashes = hashes(event)?;
    let remaining: Option<Vec<u32>> = field(event, "remaining_copy_counts")?;
    if remaining.as_ref().is_some_and(|counts| counts.len() != hashes.len()) {
        return Err(PyValueError::new_err("remaining_copy_counts must have one item per hash"));
    }
    let medium: Option<String> = field(event, "medium")?;
    Ok(Removed { hashes, tier: Tier::of_medium(medium.as_deref()), group: group(event)?, remaining })
}

fn group(event: &Bound<'_, PyAny>) -> PyResult<Option<i64>> {
    let group: Option<i64> = field(event, "group_idx")?;
    if group.is_some_and(|group| !(0..MAX_GROUPS).contains(&group)) {
        return Err(PyValueError::new_err(format!("group_idx must be from 0 to {}", MAX_GROUPS - 1)));
    }
    Ok(group)
}

fn hashes(event: &Bound<'_, PyAny>) -> PyResult<Vec<EngineHash<'static>>> {
    event.getattr("block_hashes")?.try_iter()?.map(|given| hash(&given?)).collect()
}

fn hash(given: &Bound<'_, PyAny>) -> PyResult<EngineHash<'static>> {
    if given.is_instance_of::<PyInt>() {
        return match given.extract() {
            Ok(value) => Ok(EngineHash::Unsigned(value)),
            Err(_) => given.extract().map(EngineHash::Negative),
        };
    }
    if let Ok(bytes) = given.cast::<PyBytes>() {
        return Ok(EngineHash::Bytes(bytes.as_bytes().to_vec().into()));
    }
    if let Ok(text) = given.cast::<PyString>() {
        return Ok(EngineHash::Text(text.to_str()?.to_owned().into()));
    }
    Err(PyTypeError::new_err(format!("not an engine hash: {}", given.repr()?)))
}

fn field<'py, T>(object: &Bound<'py, PyAny>, name: &str) -> PyResult<T>
where
    T: for<'a> FromPyObject<'a, 'py>,
{
    object.getattr(name)?.extract().map_err(Into::into)
}
