//! Renders the document as an HTML page: one file, no script, nothing to load.

use std::fmt::Write;

use serde_json::Value;

use super::resolve;

const STYLE: &str = "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222;background:#fff}\
    code,pre{font:14px/1.5 ui-monospace,monospace;background:#f4f4f4;border-radius:4px}code{padding:.1em .3em;overflow-wrap:anywhere}\
    pre{padding:.8rem;overflow-x:auto}table{border-collapse:collapse;width:100%}td,th{border-bottom:1px solid #ddd;padding:.4rem;\
    text-align:left;vertical-align:top}h2{margin-top:2.5rem}h2 b{color:#067}\
    @media(prefers-color-scheme:dark){body{color:#ddd;background:#181818}code,pre{background:#282828}td,th{border-color:#444}h2 b{color:#6cc}}";

const OPTIONAL: &str = " <em>optional</em>";

/// Returns an HTML page with the operations, responses and schemas of an OpenAPI document.
pub(super) fn render(document: &Value) -> String {
    let mut page = HtmlPage { document, html: String::new() };
    let title = page.text(&document["info"]["title"]);
    page.html += &format!(
        "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width\">\
         <title>{title}</title><style>{STYLE}</style></head><body><h1>{title} {}</h1><p>{}</p>\
         <p>For programs: <a href=\"/openapi.json\">/openapi.json</a></p>",
        page.text(&document["info"]["version"]),
        page.text(&document["info"]["description"]),
    );
    for (path, operations) in entries(&document["paths"]) {
        for (method, operation) in entries(operations) {
            page.operation(method, path, operation);
        }
    }
    page.html += "<h2>Schemas</h2>";
    for (name, schema) in entries(&document["components"]["schemas"]) {
        page.schema(name, schema);
    }
    page.html + "</body></html>\n"
}

struct HtmlPage<'d> {
    document: &'d Value,
    html: String,
}

impl HtmlPage<'_> {
    fn operation(&mut self, method: &str, path: &str, operation: &Value) {
        let (summary, description) = (self.text(&operation["summary"]), self.text(&operation["description"]));
        self.line(format_args!("<h2><b>{}</b> {}</h2>", method.to_uppercase(), escape(path)));
        self.line(format_args!("<p><strong>{summary}.</strong> {description}</p>"));
        if operation["security"].is_array() {
            self.html += "<p>Needs the token: <code>Authorization: Bearer TOKEN</code></p>";
        }
        let parameters: Vec<&Value> = operation["parameters"]
            .as_array()
            .into_iter()
            .flatten()
            .map(|parameter| resolve(self.document, parameter))
            .collect();
        if !parameters.is_empty() {
            self.html += "<h3>Parameters</h3><table><tr><th>Name<th>In<th>Type<th>Meaning";
        }
        for parameter in &parameters {
            let (name, what) = (self.text(&parameter["name"]), self.text(&parameter["description"]));
            let example = self.text(&parameter["example"]);
            let (place, kind) = (self.text(&parameter["in"]), self.kind(&parameter["schema"]));
            let must = if parameter["required"] == true { "" } else { OPTIONAL };
            self.line(format_args!(
                "<tr><td><code>{name}</code>{must}<td>{place}<td>{kind}<td>{what} For example: <code>{example}</code>"
            ));
        }
        if !parameters.is_empty() {
            self.html += "</table>";
        }
        for (_, example) in entries(&operation["requestBody"]["content"]["application/json"]["examples"]) {
            let body = serde_json::to_string_pretty(&example["value"]).unwrap_or_default();
            let summary = self.text(&example["summary"]);
            self.line(format_args!("<h3>{summary}</h3><pre>{}</pre>", escape(&body)));
        }
        self.line(format_args!("<h3>Responses</h3><table><tr><th>Status<th>Meaning<th>Headers<th>Body"));
        for (status, response) in entries(&operation["responses"]) {
            let response = resolve(self.document, response);
            let header = |(name, header): (&str, &Value)| {
                let description = &resolve(self.document, header)["description"];
                format!("<code>{}</code> {}", escape(name), self.text(description))
            };
            let headers: Vec<String> = entries(&response["headers"]).map(header).collect();
            let kind = |(kind, content): (&str, &Value)| format!("{} {}", escape(kind), self.kind(&content["schema"]));
            let bodies: Vec<String> = entries(&response["content"]).map(kind).collect();
            let description = self.text(&response["description"]);
            let (headers, bodies) = (headers.join("<br>"), bodies.join("<br>"));
            self.line(format_args!("<tr><td><code>{status}</code><td>{description}<td>{headers}<td>{bodies}"));
        }
        self.html += "</table>";
    }

    fn schema(&mut self, name: &str, schema: &Value) {
        self.line(format_args!("<h3 id=\"{0}\">{0}</h3><p>{1}</p>", escape(name), self.text(&schema["description"])));
        let forms = schema["oneOf"].as_array().cloned().unwrap_or_else(|| vec![schema.clone()]);
        for (index, form) in forms.iter().enumerate() {
            if index > 0 {
                self.html += "<p>or</p>";
            }
            if let Some(value) = form["const"].as_str() {
                self.line(format_args!("<p><code>{}</code> {}</p>", escape(value), self.text(&form["description"])));
                continue;
            }
            if !form["properties"].is_object() {
                self.line(format_args!("<p>{}</p>", self.kind(form)));
                continue;
            }
            let required: Vec<&str> =
                form["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
            self.html += "<table><tr><th>Field<th>Type<th>Meaning";
            for (field, property) in entries(&form["properties"]) {
                let must = if required.contains(&field) { "" } else { OPTIONAL };
                let described =
                    if property["description"].is_null() { resolve(self.document, property) } else { property };
                let (kind, what) = (self.kind(property), self.text(&described["description"]));
                self.line(format_args!("<tr><td><code>{}</code>{must}<td>{kind}<td>{what}", escape(field)));
            }
            self.html += "</table>";
        }
    }

    /// Returns a short description of a schema as HTML: type or alternatives, type of items or values, bounds, choices,
    /// pattern and examples.
    ///
    /// A schema with `$ref` becomes a link to the referenced schema on the page, which is not resolved. Only bounds
    /// that are unsigned integers are shown. Choices and examples must be strings; others are shown as empty text.
    fn kind(&self, schema: &Value) -> String {
        if let Some(reference) = schema["$ref"].as_str() {
            let name = escape(reference.rsplit('/').next().unwrap_or_default());
            return format!("<a href=\"#{name}\">{name}</a>");
        }
        for alternatives in ["anyOf", "oneOf"] {
            if let Some(alternatives) = schema[alternatives].as_array().filter(|_| schema["type"].is_null()) {
                let kinds: Vec<String> = alternatives.iter().map(|alternative| self.kind(alternative)).collect();
                return kinds.join(" or ");
            }
        }
        let words = match &schema["type"] {
            Value::Array(kinds) => kinds.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(" or "),
            kind => kind.as_str().unwrap_or_default().to_owned(),
        };
        let mut kind = escape(&words);
        for values in ["items", "additionalProperties"] {
            if schema[values].is_object() {
                kind += &format!(" of {}", self.kind(&schema[values]));
            }
        }
        for (name, word) in [
            ("minimum", "from"),
            ("maximum", "to"),
            ("minItems", "at least"),
            ("maxItems", "at most"),
            ("minLength", "at least"),
            ("maxLength", "at most"),
        ] {
            if let Some(bound) = schema[name].as_u64() {
                kind += &format!(" {word} {bound}");
            }
        }
        if let Some(choices) = schema["enum"].as_array() {
            let choices: Vec<String> = choices.iter().map(|choice| self.text(choice)).collect();
            kind += &format!(": {}", choices.join(", "));
        }
        if let Some(pattern) = schema["pattern"].as_str() {
            kind += &format!(" <code>{}</code>", escape(pattern));
        }
        if let Some(examples) = schema["examples"].as_array() {
            let examples: Vec<String> =
                examples.iter().map(|example| format!("<code>{}</code>", self.text(example))).collect();
            kind += &format!(", for example {}", examples.join(", "));
        }
        kind
    }

    fn text(&self, value: &Value) -> String {
        escape(value.as_str().unwrap_or_default())
    }

    fn line(&mut self, text: std::fmt::Arguments<'_>) {
        self.html.write_fmt(text).expect("writing to memory does not fail");
    }
}

fn entries(value: &Value) -> impl Iterator<Item = (&str, &Value)> {
    value.as_object().into_iter().flatten().map(|(name, value)| (name.as_str(), value))
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
