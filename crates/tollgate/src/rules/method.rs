//! Sets of methods, as bits.

use http::Method;

/// Standard methods, each with the bit of its place.
const STANDARD: [&str; 9] = ["GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "CONNECT", "TRACE"];
/// The bit of every method that no rule names.
const UNNAMED: u32 = 1 << 31;
/// How many further methods the rules of a set may name between them.
const FURTHER_MAX: usize = 31 - STANDARD.len();

/// A set of methods.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub(crate) struct MethodSet(u32);

impl MethodSet {
    pub(crate) const ALL: MethodSet = MethodSet(u32::MAX);
    pub(crate) const NONE: MethodSet = MethodSet(0);

    pub(crate) const fn overlaps(self, other: MethodSet) -> bool {
        self.0 & other.0 != 0
    }

    /// One of them.
    pub(crate) const fn first(self) -> MethodSet {
        MethodSet(self.0 & self.0.wrapping_neg())
    }

    /// What is in both.
    #[must_use]
    pub(crate) const fn shared(self, other: MethodSet) -> MethodSet {
        MethodSet(self.0 & other.0)
    }

    #[must_use]
    pub(crate) const fn and(self, other: MethodSet) -> MethodSet {
        MethodSet(self.0 | other.0)
    }
}

/// The methods that the rules of one set name.
///
/// Names are compared without case: a method's name has case, but there are servers that forget it, and a rule for POST
/// must hold against `post`.
#[derive(Clone, Debug, Default)]
pub(crate) struct MethodNames {
    further: Vec<Box<str>>,
}

/// Why a text names no method.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum MethodError {
    Malformed,
    TooMany,
}

impl MethodNames {
    /// The set of one method for a rule. Servers answer HEAD by running the handler of GET, so a rule for GET is for both.
    pub(crate) fn named(&mut self, name: &str) -> Result<MethodSet, MethodError> {
        let upper = name.to_ascii_uppercase();
        if Method::from_bytes(upper.as_bytes()).is_err() {
            return Err(MethodError::Malformed);
        }
        let set = self.of_name(&upper);
        if set.0 != UNNAMED {
            return Ok(if upper == "GET" { set.and(self.of_name("HEAD")) } else { set });
        }
        if self.further.len() == FURTHER_MAX {
            return Err(MethodError::TooMany);
        }
        self.further.push(upper.as_str().into());
        Ok(self.of_name(&upper))
    }

    /// The set of a request's method.
    pub(crate) fn of(&self, method: &Method) -> MethodSet {
        self.of_name(method.as_str())
    }

    /// Returns the set of the method with this name.
    pub(crate) fn of_name(&self, name: &str) -> MethodSet {
        let all = STANDARD.into_iter().chain(self.further.iter().map(|name| &**name));
        let place = all.into_iter().position(|known| known.eq_ignore_ascii_case(name));
        MethodSet(place.map_or(UNNAMED, |place| 1 << place))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(names: &MethodNames, name: &str) -> MethodSet {
        names.of(&Method::from_bytes(name.as_bytes()).unwrap())
    }

    #[test]
    fn a_rule_for_get_holds_for_head_and_case_is_no_escape() {
        let mut names = MethodNames::default();
        let (get, post) = (names.named("get").unwrap(), names.named("POST").unwrap());
        assert!(get.overlaps(of(&names, "GET")) && get.overlaps(of(&names, "HEAD")));
        assert!(post.overlaps(of(&names, "post")) && !post.overlaps(of(&names, "HEAD")));
        assert!(!names.named("HEAD").unwrap().overlaps(of(&names, "GET")));
    }

    #[test]
    fn methods_of_ones_own_are_told_apart_up_to_a_bound() {
        let mut names = MethodNames::default();
        let purge = names.named("PURGE").unwrap();
        assert!(purge.overlaps(of(&names, "purge")) && !purge.overlaps(of(&names, "BREW")));
        assert!(MethodSet::ALL.overlaps(of(&names, "BREW")));
        assert_eq!(names.named("two words"), Err(MethodError::Malformed));
        for n in 1..FURTHER_MAX {
            names.named(&format!("M{n}")).unwrap();
        }
        assert_eq!(names.named("ONEMORE"), Err(MethodError::TooMany));
        assert_eq!(names.named("purge"), Ok(purge));
    }
}
