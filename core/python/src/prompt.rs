//! Prompts from Python: any buffer of uint32 or a sequence of ints, and the extra keys of their blocks.

use std::borrow::Cow;
use std::ops::Deref;

use kvsync_index::event::ExtraKey;
use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyBytes, PyList, PySequence, PyTuple};

use crate::buffer;

/// A prompt's tokens, to be read without the GIL too.
pub(crate) enum Tokens {
    /// Bytes, which never change, read where they are. They stand as tokens must, and are a multiple of their size.
    InPlace(PyBackedBytes),
    Copied(Vec<u32>),
}

impl Deref for Tokens {
    type Target = [u32];

    fn deref(&self) -> &[u32] {
        match self {
            Self::InPlace(bytes) => bytemuck::cast_slice(bytes),
            Self::Copied(tokens) => tokens,
        }
    }
}

/// A prompt's tokens.
///
/// TypeError: not ints, or a buffer of another item type than uint32 (format 'I') or bytes. ValueError: bytes whose
/// length is no multiple of 4, or a buffer that is not contiguous. OverflowError: a token below 0 or above 2³² − 1.
pub(crate) fn tokens(given: &Bound<'_, PyAny>) -> PyResult<Tokens> {
    if let Ok(bytes) = given.cast::<PyBytes>() {
        whole(bytes.as_bytes().len())?;
        if bytemuck::try_cast_slice::<u8, u32>(bytes.as_bytes()).is_ok() {
            return Ok(Tokens::InPlace(bytes.clone().into()));
        }
    }
    if given.is_instance_of::<PyList>() || given.is_instance_of::<PyTuple>() {
        return given.extract().map(Tokens::Copied);
    }
    let buffer = match PyUntypedBuffer::get(given) {
        Ok(buffer) => buffer,
        Err(_) if given.is_instance_of::<PySequence>() => return given.extract().map(Tokens::Copied),
        Err(error) => return Err(error),
    };
    if !buffer.is_c_contiguous() {
        return Err(PyValueError::new_err("tokens must be a contiguous buffer"));
    }
    if !matches!(buffer.format().to_bytes(), b"I" | b"B") {
        return Err(PyTypeError::new_err(format!(
            "tokens must be uint32 (format 'I') or bytes, not format {:?}",
            buffer.format().to_string_lossy()
        )));
    }
    whole(buffer.len_bytes())?;
    Ok(Tokens::Copied(buffer::copied(&buffer, given.py())))
}

/// ValueError: these are not whole tokens.
fn whole(bytes: usize) -> PyResult<()> {
    if bytes.is_multiple_of(size_of::<u32>()) {
        return Ok(());
    }
    Err(PyValueError::new_err(format!("packed tokens are 4 bytes each, {bytes} bytes are no multiple of 4")))
}

/// Extra keys by block, the salt added to those of the first.
pub(crate) fn extra_keys(
    given: Option<&Bound<'_, PyAny>>,
    cache_salt: Option<&str>,
) -> PyResult<Vec<Vec<ExtraKey<'static>>>> {
    let mut blocks = Vec::new();
    if let Some(given) = given {
        for keys in given.try_iter()? {
            blocks.push(extra_keys_of_block(&keys?)?);
        }
    }
    if let Some(salt) = cache_salt {
        if blocks.is_empty() {
            blocks.push(Vec::new());
        }
        blocks[0].push(ExtraKey::Salt(Cow::Owned(salt.to_owned())));
    }
    Ok(blocks)
}

/// The extra keys of one block; None is none.
pub(crate) fn extra_keys_of_block(given: &Bound<'_, PyAny>) -> PyResult<Vec<ExtraKey<'static>>> {
    if given.is_none() {
        return Ok(Vec::new());
    }
    given.try_iter()?.map(|key| extra_key(&key?)).collect()
}

fn extra_key(key: &Bound<'_, PyAny>) -> PyResult<ExtraKey<'static>> {
    let py = key.py();
    if let Some(identifier) = key.getattr_opt(intern!(py, "identifier"))? {
        let offset = key.getattr(intern!(py, "offset"))?.extract()?;
        return Ok(ExtraKey::Image(identifier.extract::<String>()?.into(), offset));
    }
    if let Some(salt) = key.getattr_opt(intern!(py, "value"))? {
        return Ok(ExtraKey::Salt(salt.extract::<String>()?.into()));
    }
    if let Some(digest) = key.getattr_opt(intern!(py, "digest"))? {
        return Ok(ExtraKey::Embeds(digest.extract::<Vec<u8>>()?.into()));
    }
    if let Some(raw) = key.getattr_opt(intern!(py, "raw"))? {
        return Ok(ExtraKey::Opaque(raw.extract::<Vec<u8>>()?.into()));
    }
    Err(PyTypeError::new_err(format!("not an extra key: {}", key.repr()?)))
}
