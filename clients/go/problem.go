package tidegate

import (
	"regexp"
	"strconv"
	"strings"
)

const (
	jsonType     = "application/json"
	problemType  = "application/problem+json"
	problemTypes = "https://iana.org/assignments/http-problem-types#"
)

// problemBody is the body of a refusal as an RFC 9457 problem document.
type problemBody struct {
	Type             string   `json:"type"`
	Title            string   `json:"title"`
	Status           int      `json:"status"`
	Detail           string   `json:"detail"`
	ViolatedPolicies []string `json:"violated-policies,omitempty"`
	limitFields
}

// problem returns a refusal as a problem.
func (d Decision) problem() problemBody {
	fields := d.fields()
	body := problemBody{
		Type: problemTypes + "quota-exceeded", Title: "Quota exceeded",
		Status: d.StatusCode(), Detail: fields.Message, limitFields: fields.limitFields,
	}
	if d.Reason == Unavailable {
		body.Type, body.Title = problemTypes+"temporary-reduced-capacity", "The rate limiter is temporarily unavailable"
	}
	for _, status := range d.Limits {
		if !status.Allowed {
			body.ViolatedPolicies = append(body.ViolatedPolicies, status.Name)
		}
	}
	return body
}

// weightPattern matches a quality value (q) of HTTP: 0 to 1, with at most three decimal places.
var weightPattern = regexp.MustCompile(`^[01](\.[0-9]{0,3})?$`)

// asksForProblem reports whether the lines of an Accept header ask for application/problem+json: they must name it, with a
// weight above 0 and not below that of application/json.
func asksForProblem(accept []string) bool {
	var problem, json float64
	for _, mediaRange := range strings.Split(strings.Join(accept, ","), ",") {
		name, parameters, _ := strings.Cut(mediaRange, ";")
		switch name = strings.TrimSpace(name); {
		case strings.EqualFold(name, problemType):
			problem = max(problem, weightOf(parameters))
		case strings.EqualFold(name, jsonType):
			json = max(json, weightOf(parameters))
		}
	}
	return problem > 0 && problem >= json
}

// weightOf returns the weight in the parameters of a media type: 1 without q, 0 if its value is invalid.
func weightOf(parameters string) float64 {
	for _, parameter := range strings.Split(parameters, ";") {
		name, value, isPair := strings.Cut(parameter, "=")
		if !isPair || !strings.EqualFold(strings.TrimSpace(name), "q") {
			continue
		}
		value = strings.TrimSpace(value)
		if !weightPattern.MatchString(value) {
			return 0
		}
		weight, _ := strconv.ParseFloat(value, 64) // the pattern has checked it
		return min(weight, 1)
	}
	return 1
}
