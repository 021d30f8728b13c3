//! Compiles the formats of bodies.

use tidegate_config::{BodyEntry, Code, Finding, Spanned, TemplateTable, nearest};

use super::Compiler;
use crate::answer::{BodyFormat, BodyTemplate, TemplateError, placeholder_names};

impl Compiler<'_> {
    /// Compiles the format of a body. Adds an error for each mistake in a template, and returns `None` then.
    pub(super) fn body(&mut self, entry: &BodyEntry) -> Option<BodyFormat> {
        match entry {
            BodyEntry::Named(name) => Some(BodyFormat::named(*name)),
            BodyEntry::Template(table) => self.template(table).map(BodyFormat::Template),
            BodyEntry::InCode(body) => body.format().cloned(),
        }
    }

    fn template(&mut self, table: &TemplateTable) -> Option<BodyTemplate> {
        let template = &table.template;
        let content_type = table.content_type.as_ref().map_or("application/json", |content_type| content_type);
        match BodyTemplate::new(template, content_type) {
            Ok(template) => return Some(template),
            Err(TemplateError::Unknown(names)) => self.unknown_placeholders(template, &names),
            Err(error @ TemplateError::ContentType) => {
                let span = table.content_type.as_ref().map_or(template.span(), Spanned::span);
                self.note(Finding::new(Code::InvalidValue, error.to_string()).at(span));
            }
            Err(error @ TemplateError::NotJson(_)) => {
                let help = "correct it, or set `content_type`, such as \"text/plain; charset=utf-8\"";
                self.note(Finding::new(Code::InvalidValue, error.to_string()).help(help).at(template.span()));
            }
            Err(error) => self.note(Finding::new(Code::InvalidValue, error.to_string()).at(template.span())),
        }
        None
    }

    fn unknown_placeholders(&mut self, template: &Spanned<String>, names: &[String]) {
        for name in names {
            let placeholder = format!("{{{name}}}");
            let span = match template.find(&placeholder) {
                Some(start) => self.inside(template, start..start + placeholder.len()),
                None => template.span(),
            };
            let help = match nearest(name, placeholder_names()) {
                Some(meant) => format!("did you mean {{{meant}}}?"),
                None => format!("accepted here: {}", placeholder_names().collect::<Vec<_>>().join(", ")),
            };
            let finding = Finding::new(Code::InvalidValue, format!("unknown placeholder `{placeholder}`"));
            self.note(finding.help(help).at(span));
        }
    }
}
