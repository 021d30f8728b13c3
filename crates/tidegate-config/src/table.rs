//! Declares the tables of a configuration file. Everything about a setting follows from its one declaration.
//!
//! ```text
//!   /// Whether … Defaults to no.                    what it is: in the schema, and of the builder's method
//!   name as "in-the-file": Type [marks] { options },
//! ```
//!
//! `as` is needed only if the name in the file is a keyword of Rust. The marks are the methods of [`Marks`], the options
//!
//! | option | effect |
//! |---|---|
//! | `set: Type` | `Rules` has a method with the name of the field, which sets it to a value of this type; `, "…"` adds a sentence to its documentation |
//! | `changes: function` | this function lists the changes in a reload: the field has parts with names of their own, such as rules |
//!
//! `named function` after the name of a table sets how findings about rules that are built in code name an entry of a
//! list of such tables. `setters name` declares a macro with this name, by which crate `tidegate` declares the methods of
//! `Rules`.
//!
//! From a declaration follow the struct, how it is read ([`FieldValue::from_node`]), its JSON schema, which of its
//! changes a reload lists ([`FieldValue::note_changes`]) and which need a restart ([`FieldValue::note_restart`]), how
//! findings name its values if they were set in code ([`FieldValue::name_values`]), and [`Table`].

use super::span::{Span, Spanned};

/// What holds for a field besides its type.
#[derive(Clone, Copy)]
pub(crate) struct Marks {
    pub(crate) is_required: bool,
    pub(crate) is_unlisted: bool,
    pub(crate) is_requests_only: bool,
    pub(crate) needs_restart: bool,
    pub(crate) name_in_code: Option<&'static str>,
}

impl Marks {
    pub(crate) const NONE: Marks = Marks {
        is_required: false,
        is_unlisted: false,
        is_requests_only: false,
        needs_restart: false,
        name_in_code: None,
    };

    /// Marks a field that must be in the file, although its type has a value for an absent one.
    pub(crate) const fn required(self) -> Marks {
        Marks { is_required: true, ..self }
    }

    /// Marks a field whose changes a reload does not list: it identifies its table, or is compared elsewhere.
    pub(crate) const fn unlisted(self) -> Marks {
        Marks { is_unlisted: true, ..self }
    }

    /// Marks a field that has no effect on a check that names its key and limit.
    pub(crate) const fn requests_only(self) -> Marks {
        Marks { is_requests_only: true, ..self }
    }

    /// Marks a field that is read only at startup: a change takes effect after a restart. Of a table, all its fields.
    pub(crate) const fn restart(self) -> Marks {
        Marks { needs_restart: true, ..self }
    }

    /// Sets the name of a field in findings about rules that are built in code. Defaults to its name in Rust. With an
    /// empty name, its value has the name of its table.
    pub(crate) const fn in_code(self, name: &'static str) -> Marks {
        Marks { name_in_code: Some(name), ..self }
    }
}

/// A table that was declared by [`tables!`].
pub(crate) trait Table {
    /// Returns the names of the fields with the mark `requests_only` that have another value than an absent field.
    fn set_for_requests_only(&self) -> Vec<&'static str>;

    /// Returns whether any field differs, except those with the mark `unlisted`.
    fn has_listed_change(&self, after: &Self) -> bool;
}

/// The names of values that were set in code. The span of a value starts at the index of its name.
#[derive(Default)]
pub(crate) struct ValueNames(pub Vec<String>);

impl ValueNames {
    /// Adds a name, and returns the span of its value.
    pub(crate) fn add(&mut self, name: &str) -> Span {
        self.0.push(name.to_owned());
        Span::new(self.0.len() - 1, self.0.len())
    }
}

/// Joins the names of a table and of a field with `separator`. Returns the other one if one of them is empty.
pub(crate) fn joined(table: &str, separator: &str, field: &str) -> String {
    let separator = if table.is_empty() || field.is_empty() { "" } else { separator };
    format!("{table}{separator}{field}")
}

/// A value that a method of `Rules` sets a field of type `F` to.
pub trait IntoField<F> {
    /// Returns the value of the field. Its span is unknown.
    fn into_field(self) -> F;
}

impl<T> IntoField<T> for T {
    fn into_field(self) -> T {
        self
    }
}

impl<T> IntoField<Spanned<T>> for T {
    fn into_field(self) -> Spanned<T> {
        self.into()
    }
}

impl<T> IntoField<Option<Spanned<T>>> for T {
    fn into_field(self) -> Option<Spanned<T>> {
        Some(self.into())
    }
}

/// Declares tables; see the [module](self).
macro_rules! tables {
    (@name $field:ident) => { stringify!($field) };
    (@name $field:ident $name:literal) => { $name };
    (@marks $([$($mark:ident $(($argument:literal))?),*])?) => {
        $crate::table::Marks::NONE $($(.$mark($($argument)?))*)?
    };
    (@absent $($marks:tt)?) => {
        if tables!(@marks $($marks)?).is_required { None } else { $crate::read::FieldValue::absent() }
    };
    (@changes { changes: $function:path } $changes:ident, $before:expr, $after:expr, $name:expr, $owner:expr) => {
        $function($changes, $before, $after)
    };
    (@changes $({ $($options:tt)* })? $changes:ident, $before:expr, $after:expr, $name:expr, $owner:expr) => {
        $crate::read::FieldValue::note_changes($before, $after, $name, $owner, $changes)
    };
    (@setters => $fields:tt) => {};
    (@setters $setters:ident => $fields:tt) => {
        /// Passes the fields of the table to a macro `setters` of the caller, each with its documentation and its options.
        #[doc(hidden)]
        #[macro_export]
        macro_rules! $setters {
            () => {
                setters! $fields
            };
        }
    };
    ($(
        $(#[$attribute:meta])*
        $visibility:vis struct $table:ident $(setters $setters:ident)? $(named $namer:path)? {$(
            $(#[doc = $about:literal])*
            $(#[cfg_attr($($schema:tt)*)])?
            $field:ident $(as $name:literal)?: $type:ty $([$($marks:tt)*])? $({ $($options:tt)* })?,
        )*}
    )*) => {$(
        #[derive(Clone, PartialEq, Debug)]
        #[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(deny_unknown_fields))]
        $(#[$attribute])*
        $visibility struct $table {$(
            $(#[doc = $about])*
            $(#[cfg_attr($($schema)*)])?
            $(#[cfg_attr(feature = "schema", schemars(rename = $name))])?
            pub $field: $type,
        )*}

        impl $crate::read::FieldValue for $table {
            fn from_node(
                node: &$crate::tree::Node,
                reader: &mut $crate::read::Reader<'_>,
            ) -> Option<$table> {
                let fields = reader.table(node, &[$(tables!(@name $field $($name)?)),*])?;
                $(
                    let absent = tables!(@absent $([$($marks)*])?);
                    let $field = reader.field(&fields, tables!(@name $field $($name)?), absent);
                )*
                reader.end_table(&fields);
                // Every field was read, with its errors, before a missing one ends the reading of the table.
                Some($table { $($field: $field?),* })
            }

            fn absent() -> Option<$table> {
                Some($table { $($field: (tables!(@absent $([$($marks)*])?))?),* })
            }

            fn note_changes(
                &self,
                after: &$table,
                name: &str,
                owner: &str,
                changes: &mut $crate::changes::Changes,
            ) {
                $(if !tables!(@marks $([$($marks)*])?).is_unlisted {
                    tables!(@changes $({ $($options)* })? changes, &self.$field, &after.$field,
                        &$crate::table::joined(name, ".", tables!(@name $field $($name)?)), owner);
                })*
                $(if tables!(@marks $([$($marks)*])?).needs_restart {
                    let name = $crate::table::joined(name, ".", tables!(@name $field $($name)?));
                    $crate::read::FieldValue::note_restart(&self.$field, &after.$field, &name, changes);
                })*
            }

            fn note_restart(&self, after: &$table, name: &str, changes: &mut $crate::changes::Changes) {
                $({
                    let name = $crate::table::joined(name, ".", tables!(@name $field $($name)?));
                    $crate::read::FieldValue::note_restart(&self.$field, &after.$field, &name, changes);
                })*
            }

            fn note_changes_of_present(
                &self,
                after: &$table,
                name: &str,
                owner: &str,
                changes: &mut $crate::changes::Changes,
            ) {
                if self != after {
                    changes.changed_field(name, owner);
                    self.note_changes(after, "", name, changes);
                }
            }

            fn name_values(&mut self, name: &str, names: &mut $crate::table::ValueNames) {
                $({
                    let field = tables!(@marks $([$($marks)*])?).name_in_code.unwrap_or(stringify!($field));
                    self.$field.name_values(&$crate::table::joined(name, ", ", field), names);
                })*
            }

            $(fn item_name(&self, _list: &str, index: usize) -> String {
                $namer(self, index)
            })?
        }

        impl $crate::table::Table for $table {
            fn set_for_requests_only(&self) -> Vec<&'static str> {
                let mut names = Vec::new();
                $(if tables!(@marks $([$($marks)*])?).is_requests_only
                    && $crate::read::FieldValue::absent().as_ref() != Some(&self.$field)
                {
                    names.push(tables!(@name $field $($name)?));
                })*
                names
            }

            fn has_listed_change(&self, after: &$table) -> bool {
                false $(|| (!tables!(@marks $([$($marks)*])?).is_unlisted && self.$field != after.$field))*
            }
        }

        tables!(@setters $($setters)? => {
            $($field [$(#[doc = $about])*] { $($($options)*)? })*
        });
    )*};
}

pub(crate) use tables;
