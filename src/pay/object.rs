//! JSON objects written member by member, so that raw values from outside keep every byte.

use serde_json::value::RawValue;

use crate::json;

/// Members in the order in which they are added.
#[derive(Debug)]
pub(crate) struct Object(String);

impl Object {
    pub(crate) fn new() -> Object {
        Object(String::from("{"))
    }

    fn name(&mut self, name: &str) {
        if self.0.len() > 1 {
            self.0.push(',');
        }
        self.0.push_str(json::raw(name).get());
        self.0.push(':');
    }

    pub(crate) fn raw(mut self, name: &str, value: &RawValue) -> Object {
        self.name(name);
        self.0.push_str(value.get());
        self
    }

    /// Anything of ours that serializes: texts, numbers, flags, lists of them.
    pub(crate) fn with<T: serde::Serialize + ?Sized>(self, name: &str, value: &T) -> Object {
        let value = json::raw(value);
        self.raw(name, &value)
    }

    pub(crate) fn maybe<T: serde::Serialize>(self, name: &str, value: Option<T>) -> Object {
        match value {
            Some(value) => self.with(name, &value),
            None => self,
        }
    }

    pub(crate) fn maybe_raw(self, name: &str, value: Option<&RawValue>) -> Object {
        match value {
            Some(value) => self.raw(name, value),
            None => self,
        }
    }

    pub(crate) fn build(mut self) -> Box<RawValue> {
        self.0.push('}');
        RawValue::from_string(self.0).unwrap_or_else(|_| RawValue::NULL.to_owned())
    }
}

/// An array of raw values.
pub(crate) fn array<'a>(values: impl IntoIterator<Item = &'a RawValue>) -> Box<RawValue> {
    let joined = values.into_iter().map(RawValue::get).collect::<Vec<_>>().join(",");
    RawValue::from_string(format!("[{joined}]")).unwrap_or_else(|_| RawValue::NULL.to_owned())
}
