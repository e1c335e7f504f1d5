package gormoutbox

import "strings"

// verb is what a statement does to the transaction.
type verb int

const (
	otherStatement      verb = iota
	setSavepoint             // SAVEPOINT name
	releaseSavepoint         // RELEASE [SAVEPOINT] name
	rollbackToSavepoint      // ROLLBACK [WORK | TRANSACTION] TO [SAVEPOINT] name
	endTransaction           // COMMIT, END, ROLLBACK, ABORT
)

// control is a statement that moves the bounds of a transaction.
type control struct {
	verb verb
	name string // as written, with its quotes
}

// parseControl looks at the first words of a statement. It is called for every
// one in a transaction: most are told by their first word, without allocating.
func parseControl(query string) control {
	first, rest := word(query)
	switch {
	case strings.EqualFold(first, "SAVEPOINT"):
		name, _ := word(rest)
		return control{setSavepoint, name}
	case strings.EqualFold(first, "RELEASE"):
		name, _ := word(skip(rest, "SAVEPOINT"))
		return control{releaseSavepoint, name}
	case strings.EqualFold(first, "ROLLBACK"):
		to, rest := word(skip(skip(rest, "WORK"), "TRANSACTION"))
		if !strings.EqualFold(to, "TO") {
			return control{verb: endTransaction}
		}
		name, _ := word(skip(rest, "SAVEPOINT"))
		return control{rollbackToSavepoint, name}
	case strings.EqualFold(first, "COMMIT"), strings.EqualFold(first, "END"), strings.EqualFold(first, "ABORT"):
		return control{verb: endTransaction}
	default:
		return control{}
	}
}

// key is equal for names that mean the same savepoint. Case matters in quotes
// only, and there only if exact is set, as on PostgreSQL.
func (c control) key(exact bool) string {
	name, quoted := c.name, false
	if q := closing(name); q != 0 && len(name) >= 2 {
		quoted = true
		name = name[1 : len(name)-1]
		if q != ']' {
			name = strings.ReplaceAll(name, string([]byte{q, q}), string(q))
		}
	}
	if quoted && exact {
		return name
	}
	return strings.ToLower(name)
}

// closing is the quote that ends what s begins; zero: s begins with none.
func closing(s string) byte {
	if s == "" {
		return 0
	}
	switch s[0] {
	case '"', '`', '\'':
		return s[0]
	case '[':
		return ']'
	default:
		return 0
	}
}

// skip leaves out a word that may stand before another.
func skip(s, optional string) string {
	first, rest := word(s)
	if !strings.EqualFold(first, optional) {
		return s
	}
	if next, _ := word(rest); next == "" || next == ";" {
		return s // then it is a name itself
	}
	return rest
}

// word cuts the first word, quoted name or other character off s.
func word(s string) (first, rest string) {
	s = strings.TrimLeft(s, " \t\r\n\f\v")
	n := 0
	if q := closing(s); q != 0 {
		n = quotedLen(s, q)
	} else {
		for n < len(s) && inWord(s[n]) {
			n++
		}
		if n == 0 && s != "" {
			n = 1
		}
	}
	return s[:n], s[n:]
}

// quotedLen is the length of the quoted name at the start of s, where a doubled
// quote stands for one.
func quotedLen(s string, q byte) int {
	for i := 1; i < len(s); i++ {
		switch {
		case s[i] != q:
		case q != ']' && i+1 < len(s) && s[i+1] == q:
			i++
		default:
			return i + 1
		}
	}
	return len(s)
}

// inWord includes every byte of a character beyond ASCII.
func inWord(c byte) bool {
	return c == '_' || c == '$' || c >= 0x80 ||
		c >= '0' && c <= '9' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z'
}
