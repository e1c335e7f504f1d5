package migrator

import (
	"embed"
	"fmt"
	"strings"

	"github.com/gormoutbox/outbox/internal/tables"
)

// latest is the version of the tables that this library works with. For each
// version from 1 to it there is a pair of files in sql.
const latest = 1

// Indexes of the message table, by what tables.Name.Index appends. In the
// files a suffix without its underscore, in braces, stands for the index.
var suffixes = []string{"_ready", "_due", "_failed", "_dead", "_dead_at", "_delivered"}

//go:embed sql/*.sql
var files embed.FS

// statements reads the file of a version and direction and puts in the names.
//
// The text is cut into statements at the semicolons that end a line, before
// the names are put in, which may contain anything. Each is sent by itself:
// several at once cannot be prepared. A file that changes an existing version
// also records the new one in the meta table, so that the text does the same
// whoever runs it.
func statements(d Dialect, version int, dir Direction, name tables.Name) ([]string, error) {
	text, err := files.ReadFile(fmt.Sprintf("sql/%s_%03d_%s.sql", d, version, dir))
	if err != nil {
		return nil, fmt.Errorf("read migration: %w", err)
	}
	pairs := []string{"{messages}", name.Messages(), "{meta}", name.Meta()}
	for _, s := range suffixes {
		pairs = append(pairs, "{"+s[1:]+"}", name.Index(s))
	}
	names := strings.NewReplacer(pairs...)
	var list []string
	for part := range strings.SplitSeq(string(text), ";\n") {
		if part = strings.TrimSpace(part); part != "" {
			list = append(list, names.Replace(part))
		}
	}
	return list, nil
}
