package tidegate

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

const (
	limitBytesMax   = 256
	quotaMax        = 10_000_000
	slidingLogMax   = 100_000
	windowUsMin     = 1_000
	windowUsMax     = 400 * 86_400 * 1_000_000
	shownRunesMax   = 32
	limitExample    = "for example 10/min or 100/min token-bucket burst=20"
	algorithmsText  = "sliding, sliding-log, sliding-counter, fixed-window, token-bucket, leaky-bucket"
	asciiWhitespace = " \t\n\f\r"
)

// unitsUs maps the names of units of time to microseconds.
var unitsUs = map[string]int64{
	"week": 604_800_000_000, "weeks": 604_800_000_000, "w": 604_800_000_000,
	"day": 86_400_000_000, "days": 86_400_000_000, "d": 86_400_000_000,
	"h": 3_600_000_000, "hr": 3_600_000_000, "hour": 3_600_000_000, "hours": 3_600_000_000,
	"min": 60_000_000, "mins": 60_000_000, "minute": 60_000_000, "minutes": 60_000_000, "m": 60_000_000,
	"s": 1_000_000, "sec": 1_000_000, "secs": 1_000_000, "second": 1_000_000, "seconds": 1_000_000,
	"ms": 1_000, "us": 1, "µs": 1,
}

// parsedLimit is a limit whose values are all in range.
type parsedLimit struct {
	algorithm   string
	quota       int64
	windowUs    int64
	capacity    int64 // burst or queue; the quota for algorithms that have neither
	countDenied bool
}

func (l parsedLimit) window() time.Duration { return time.Duration(l.windowUs) * time.Microsecond }

// line returns the limit line of the script, for a counter whose window is part of its key.
func (l parsedLimit) line(cost int64) string {
	line := fmt.Sprintf("%s %d %d %d", l.algorithm, l.quota, l.windowUs, cost)
	if l.capacity != l.quota {
		line += fmt.Sprintf(" %s=%d", capacityOption(l.algorithm), l.capacity)
	}
	if l.countDenied {
		line += " count_denied=1"
	}
	return line + " window=fixed"
}

// ValidateLimit reports whether the text is a limit. The error is [ErrInvalid] and names what is expected.
func ValidateLimit(text string) error {
	_, err := parseLimit(text)
	return err
}

func parseLimit(text string) (parsedLimit, error) {
	limit, err := parseExactly(text)
	if err == nil {
		return limit, nil
	}
	if meant := limitMeant(text); meant != "" {
		return parsedLimit{}, fmt.Errorf("%w; did you mean %s?", err, meant)
	}
	return parsedLimit{}, err
}

// limitMeant returns the limit that a text in another common form means, as it must be written: "10/min" for "10 / min",
// "10 per minute" or "10/MIN", and "10/90min" for "10/1.5h". It returns "" if the text has another form, or that limit would
// be invalid.
func limitMeant(text string) string {
	if len(text) > limitBytesMax {
		return ""
	}
	words := fields(strings.ReplaceAll(strings.ToLower(text), "/", " / "))
	if len(words) < 3 || words[1] != "/" && words[1] != "per" {
		return ""
	}
	window, rest := words[2], words[3:]
	if len(rest) > 0 && strings.Trim(window, "0123456789.") == "" {
		window, rest = window+rest[0], rest[1:]
	}
	us := fractionalWindowUs(window)
	if us < 0 {
		return ""
	}
	limit := strings.Join(append([]string{words[0] + "/" + windowText(us)}, rest...), " ")
	if _, err := parseExactly(limit); err != nil {
		return ""
	}
	return limit
}

// fractionalWindowUs parses a window whose number may have a fraction of up to three digits, such as "1.5h". It returns -1 if
// the window is not a whole number of microseconds.
func fractionalWindowUs(window string) int64 {
	unit := strings.TrimLeft(window, "0123456789.")
	unitUs, isUnit := unitsUs[unit]
	number := strings.TrimSuffix(window, unit)
	switch {
	case !isUnit:
		return -1
	case number == "":
		return unitUs
	}
	wholeText, fractionText, hasFraction := strings.Cut(number, ".")
	if !hasFraction {
		fractionText = "0"
	}
	whole, fraction := int64(0), digits(fractionText, 999)
	if wholeText != "" {
		whole = digits(wholeText, windowUsMax/unitUs)
	}
	divisor := int64(1)
	for range fractionText {
		divisor *= 10
	}
	if whole < 0 || fraction < 0 || divisor > 1000 || fraction*unitUs%divisor != 0 {
		return -1
	}
	return whole*unitUs + fraction*unitUs/divisor
}

// windowText returns a window in the largest unit that divides it: "min", "90min", "500ms".
func windowText(windowUs int64) string {
	for _, unit := range []string{"week", "day", "h", "min", "s", "ms"} {
		if us := unitsUs[unit]; windowUs == us {
			return unit
		} else if windowUs > us && windowUs%us == 0 {
			return fmt.Sprintf("%d%s", windowUs/us, unit)
		}
	}
	return fmt.Sprintf("%dus", windowUs)
}

// fields splits a text at ASCII white space.
func fields(text string) []string {
	return strings.FieldsFunc(text, func(r rune) bool { return strings.ContainsRune(asciiWhitespace, r) })
}

func parseExactly(text string) (parsedLimit, error) {
	if len(text) > limitBytesMax {
		return parsedLimit{}, invalid("a limit can have at most %d bytes, but this one has %d; %s", limitBytesMax, len(text), limitExample)
	}
	words := fields(text)
	if len(words) == 0 {
		return parsedLimit{}, invalid("expected QUOTA/WINDOW, found nothing; %s", limitExample)
	}
	limit := parsedLimit{algorithm: "sliding"}
	var err error
	if limit.quota, limit.windowUs, err = parseRate(words[0]); err != nil {
		return parsedLimit{}, err
	}
	options := words[1:]
	if len(options) > 0 && !strings.Contains(options[0], "=") {
		limit.algorithm, options = options[0], options[1:]
	}
	switch limit.algorithm {
	case "sliding", "sliding-counter", "fixed-window", "token-bucket", "leaky-bucket":
	case "sliding-log":
		if limit.quota > slidingLogMax {
			return parsedLimit{}, invalid("a quota must be from 1 to %d for sliding-log, found %d", slidingLogMax, limit.quota)
		}
	default:
		return parsedLimit{}, invalid("unknown algorithm %s; expected one of %s", shown(limit.algorithm), algorithmsText)
	}
	limit.capacity = limit.quota
	if err := limit.parseOptions(options); err != nil {
		return parsedLimit{}, err
	}
	return limit, nil
}

// parseRate parses QUOTA/WINDOW and returns the quota and the window in microseconds.
func parseRate(word string) (quota, windowUs int64, err error) {
	quotaText, windowWord, hasSlash := strings.Cut(word, "/")
	if !hasSlash {
		return 0, 0, invalid("expected a / between quota and window, found %s; %s", shown(word), limitExample)
	}
	if quota = digits(quotaText, quotaMax); quota < 1 {
		return 0, 0, invalid("expected a quota from 1 to %d in digits, found %s; %s", quotaMax, shown(quotaText), limitExample)
	}
	unit := strings.TrimLeft(windowWord, "0123456789")
	count := int64(1)
	if countText := windowWord[:len(windowWord)-len(unit)]; countText != "" {
		count = digits(countText, windowUsMax)
	}
	if unit == "" {
		return 0, 0, invalid("expected a window: a whole number and a unit, or a unit alone (500ms, 10s, min, day), found %s", shown(windowWord))
	}
	if len(unit) > 1 && unit[0] == '.' && strings.TrimLeft(unit[1:2], "0123456789") == "" {
		return 0, 0, invalid("expected a window in whole numbers, such as 90min, found %s", shown(windowWord))
	}
	unitUs, isUnit := unitsUs[unit]
	if !isUnit {
		return 0, 0, invalid("unknown unit of time %s; expected one of us, ms, s, min, h, day, week", shown(unit))
	}
	// A count that is too large is -1. The division excludes an overflow.
	if count < 0 || count > windowUsMax/unitUs {
		return 0, 0, invalid("a window must be from 1ms to 400day, the longest whose arithmetic is exact in Redis, found %s", shown(windowWord))
	}
	if count*unitUs < windowUsMin {
		return 0, 0, invalid("a window must be from 1ms to 400day, found %s", shown(windowWord))
	}
	return quota, count * unitUs, nil
}

// parseOptions sets the fields that the options determine.
func (l *parsedLimit) parseOptions(words []string) error {
	seen := map[string]bool{}
	for _, word := range words {
		name, value, hasValue := strings.Cut(word, "=")
		switch {
		case !hasValue || name != "burst" && name != "queue" && name != "count_denied":
			return invalid("unknown option %s; expected one of burst=N, queue=N, count_denied=true|false", shown(word))
		case seen[name]:
			return invalid("the option %s is given twice", name)
		case name == "count_denied":
			if value != "true" && value != "false" {
				return invalid("expected count_denied=true or count_denied=false, found %s", shown(word))
			}
			l.countDenied = value == "true"
		case name != capacityOption(l.algorithm):
			return invalid("%s is not an option of %s", name, l.algorithm)
		default:
			if l.capacity = digits(value, quotaMax); l.capacity < 1 {
				return invalid("expected %s=N with N from 1 to %d, in digits, found %s", name, quotaMax, shown(word))
			}
		}
		seen[name] = true
	}
	return nil
}

// capacityOption returns the name of the option that sets the capacity, or "" if the algorithm has none.
func capacityOption(algorithm string) string {
	switch algorithm {
	case "token-bucket":
		return "burst"
	case "leaky-bucket":
		return "queue"
	}
	return ""
}

// digits parses a decimal number. It returns -1 if the text is empty, has other characters, or exceeds max.
func digits(text string, max int64) int64 {
	if text == "" || strings.Trim(text, "0123456789") != "" {
		return -1
	}
	number, err := strconv.ParseInt(text, 10, 64)
	if err != nil || number > max {
		return -1
	}
	return number
}

// shown quotes the start of a string for an error message.
func shown(text string) string {
	if runes := []rune(text); len(runes) > shownRunesMax {
		text = string(runes[:shownRunesMax])
	}
	return strconv.Quote(text)
}

// periodOf returns a window in words, in the largest unit that divides it: "per minute", "per 10 seconds".
func periodOf(window time.Duration) string {
	for _, unit := range []struct {
		duration  time.Duration
		one, many string
	}{
		{7 * 24 * time.Hour, "week", "weeks"},
		{24 * time.Hour, "day", "days"},
		{time.Hour, "hour", "hours"},
		{time.Minute, "minute", "minutes"},
		{time.Second, "second", "seconds"},
		{time.Millisecond, "ms", "ms"},
		{time.Microsecond, "us", "us"},
	} {
		if window%unit.duration != 0 {
			continue
		}
		if count := window / unit.duration; count != 1 {
			return fmt.Sprintf("per %d %s", count, unit.many)
		}
		return "per " + unit.one
	}
	return "per " + window.String()
}
