package outbox

import (
	"fmt"
	"strings"
	"time"
	"unicode/utf8"
)

// The bounds of a message. They are the same on every database.
const (
	MaxTypeBytes     = 255
	MaxGroupKeyBytes = 16 << 10
	MaxPayloadBytes  = 64 << 20
	// MaxHeadersBytes bounds the keys and values of all headers together.
	MaxHeadersBytes = 2 << 20
)

// validate says what a database would refuse or silently change in the
// message. An error names the field and what would be right, but quotes no
// text of the message except the key of a header. The outbox's name is not
// looked at.
func (m *Message) validate(requireGroup bool) error {
	if m.Type == "" {
		return problem("Type", `is empty; it must say what the message is, such as "order.placed"`)
	}
	if err := checkText("Type", m.Type, MaxTypeBytes); err != nil {
		return err
	}
	if err := checkText("GroupKey", m.GroupKey, MaxGroupKeyBytes); err != nil {
		return err
	}
	if requireGroup && m.GroupKey == "" {
		return problem("GroupKey", "is empty; the outbox requires one")
	}
	if n := len(m.Payload); n > MaxPayloadBytes {
		return problem("Payload", "has %d bytes; it must have at most %d", n, MaxPayloadBytes)
	}
	if err := checkHeaders(m.Headers); err != nil {
		return err
	}
	return m.checkDue()
}

func (m *Message) checkDue() error {
	switch year := m.DeliverAt.UTC().Year(); {
	case m.Delay < 0:
		return problem("Delay", "is %v; it must not be negative", m.Delay)
	case m.DeliverAt.IsZero():
		return nil
	case m.Delay > 0:
		return problem("Delay", "is %v and DeliverAt is set; only one of them may be", m.Delay)
	case year < 1 || year > 9999:
		return problem("DeliverAt", "is %s; its year must be from 1 to 9999", m.DeliverAt.Format(time.RFC3339))
	}
	return nil
}

func checkHeaders(headers map[string]string) error {
	size := 0
	for key, value := range headers {
		size += len(key) + len(value)
	}
	if size > MaxHeadersBytes {
		return problem("Headers", "have %d bytes; they must have at most %d", size, MaxHeadersBytes)
	}
	for key, value := range headers {
		field := fmt.Sprintf("Headers[%q]", excerpt(key))
		if err := checkText("the key of "+field, key, MaxHeadersBytes); err != nil {
			return err
		}
		if err := checkText(field, value, MaxHeadersBytes); err != nil {
			return err
		}
	}
	return nil
}

// checkText refuses what PostgreSQL cannot store in a text, or Go's JSON
// encoder would replace in silence.
func checkText(field, s string, limit int) error {
	if len(s) > limit {
		return problem(field, "has %d bytes; it must have at most %d", len(s), limit)
	}
	if i := strings.IndexByte(s, 0); i >= 0 {
		return problem(field, "has a NUL at byte %d; it must have none", i)
	}
	if i := invalidUTF8(s); i >= 0 {
		return problem(field, "has no valid UTF-8 at byte %d; it must be UTF-8 throughout", i)
	}
	return nil
}

// invalidUTF8 returns the place of the first byte that is not valid, or -1.
func invalidUTF8(s string) int {
	if utf8.ValidString(s) {
		return -1
	}
	for i, r := range s {
		if r != utf8.RuneError {
			continue
		}
		if _, size := utf8.DecodeRuneInString(s[i:]); size == 1 {
			return i
		}
	}
	return -1
}

// problem is an error about a field.
func problem(field, format string, args ...any) error {
	return fmt.Errorf("%s %s", field, fmt.Sprintf(format, args...))
}

// excerpt keeps an error readable, whatever it quotes.
func excerpt(s string) string {
	const longest = 64
	if len(s) <= longest {
		return s
	}
	return s[:longest] + "..."
}
