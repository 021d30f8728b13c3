//! Compiles the conditions of rules.

use http::{HeaderName, HeaderValue};
use tidegate_config::{Code, Finding, HeaderTest, MatchTable, OneOrMany, Spanned};

use super::Compiler;
use crate::rules::host::HostPattern;
use crate::rules::matcher::{Conditions, HeaderCondition, HeaderText};
use crate::rules::method::{MethodError, MethodNames, MethodSet};
use crate::rules::pattern::Pattern;

impl Compiler<'_> {
    /// Compiles the conditions of a rule on requests; groups are a condition on the caller. The second value is `false` if
    /// no request can meet all of them, because the list of methods, paths, hosts or groups is empty.
    ///
    /// Adds an error for each invalid condition and leaves it out. `names` collects the non-standard methods of all
    /// rules.
    pub(super) fn conditions(&mut self, table: &MatchTable, names: &mut MethodNames) -> (Conditions, bool) {
        let MatchTable { methods, path, host, groups, headers } = table;
        let is_emptied =
            |list: &Option<Spanned<OneOrMany<Spanned<String>>>>| list.as_ref().is_some_and(|list| list.is_empty());
        let can_be_met = ![methods, path, host, groups].into_iter().any(is_emptied);

        let mut conditions = Conditions::default();
        if let Some(methods) = methods {
            let sets: Vec<MethodSet> = methods.iter().filter_map(|name| self.method(name, names)).collect();
            conditions.methods = sets.into_iter().fold(MethodSet::NONE, MethodSet::union);
        }
        let texts = |list: &Option<Spanned<OneOrMany<Spanned<String>>>>| {
            list.as_ref().map(|list| list.0.clone()).unwrap_or_default()
        };
        conditions.paths = texts(path).iter().filter_map(|text| self.pattern(text)).collect();
        conditions.hosts = texts(host).iter().filter_map(|text| self.host(text)).collect();
        for (name, test) in headers {
            let Some(header) = self.header_name(name) else { continue };
            let Some(condition) = self.header_condition(name, test) else { continue };
            if conditions.headers.insert(HeaderText::of(&header), condition).is_some() {
                let message = format!("the header `{header}` is tested twice");
                let help = "header names are case-insensitive; to match several values, write a rule for each";
                self.note(Finding::new(Code::InvalidHeader, message).help(help).at(name.span()));
            }
        }
        (conditions, can_be_met)
    }

    /// Parses a path pattern. Adds an error and returns `None` if it is invalid.
    pub(super) fn pattern(&mut self, text: &Spanned<String>) -> Option<Pattern> {
        Pattern::parse(text)
            .map_err(|error| {
                let span = self.inside(text, error.span.clone());
                self.note(Finding::new(Code::InvalidPath, error.message).help(error.help).at(span));
            })
            .ok()
    }

    /// Parses the name of a header. Adds an error and returns `None` if it is invalid.
    pub(super) fn header_name(&mut self, name: &Spanned<String>) -> Option<HeaderName> {
        let parsed = HeaderName::from_bytes(name.as_bytes());
        self.accept(
            parsed.map_err(|_| "expected the name of a header, such as x-tenant"),
            Code::InvalidHeader,
            name.span(),
        )
    }

    fn method(&mut self, name: &Spanned<String>, names: &mut MethodNames) -> Option<MethodSet> {
        names
            .register(name)
            .map_err(|error| {
                let message = match error {
                    MethodError::Malformed => "expected a method, such as GET or POST",
                    MethodError::TooMany => "the rules have too many different non-standard methods",
                };
                self.note(Finding::new(Code::InvalidMethod, message).at(name.span()));
            })
            .ok()
    }

    /// Parses a host pattern. Adds an error and returns `None` if it is invalid.
    pub(super) fn host(&mut self, text: &Spanned<String>) -> Option<HostPattern> {
        HostPattern::parse(text)
            .map_err(|help| self.note(Finding::new(Code::InvalidHost, "invalid host").help(help).at(text.span())))
            .ok()
    }

    fn header_condition(&mut self, name: &Spanned<String>, test: &HeaderTest) -> Option<HeaderCondition> {
        match test {
            HeaderTest::Present => Some(HeaderCondition::Present),
            HeaderTest::Equals(text) => {
                let value = if text.trim() == text {
                    HeaderValue::from_str(text).map_err(|_| "the value of a header must be visible ASCII")
                } else {
                    Err("the value of a header cannot begin or end with a space")
                };
                self.accept(value, Code::InvalidHeader, name.span()).map(HeaderCondition::Equals)
            }
        }
    }
}
