package migrator

import (
	"fmt"
	"strings"
)

// Direction is up or down.
type Direction string

// The directions.
const (
	Up   Direction = "up"
	Down Direction = "down"
)

// Format is how SQL writes statements for another tool.
type Format string

const (
	// Plain is statements and nothing else, for a file of golang-migrate or
	// Atlas, or for psql --single-transaction. They must run in one
	// transaction, which is not part of the text because tools begin their own.
	Plain Format = "plain"
	// Goose is a section of a goose file. The sections of Up and Down, one
	// after the other, are a whole file.
	Goose Format = "goose"
)

// SQL writes what Migrator.Up does on an empty database, or Migrator.Down on a
// migrated one, as text for another migration tool or for a role that has more
// rights. It records the version and draws an installation id like Up, so that
// Check accepts the result, and so that Up has nothing left to do.
func SQL(cfg Config, dir Direction, format Format) (string, error) {
	if err := cfg.validate(); err != nil {
		return "", fmt.Errorf("migrator: %w", err)
	}
	if dir != Up && dir != Down {
		return "", fmt.Errorf("migrator: the direction is %q; it must be %q or %q", dir, Up, Down)
	}
	list, err := export(cfg, dir)
	if err != nil {
		return "", fmt.Errorf("migrator: %w", err)
	}
	switch format {
	case Plain:
		return strings.Join(list, ";\n\n") + ";\n", nil
	case Goose:
		return goose(dir, list), nil
	}
	return "", fmt.Errorf("migrator: the format is %q; it must be %q or %q", format, Plain, Goose)
}

func export(cfg Config, dir Direction) ([]string, error) {
	var list []string
	if cfg.Schema != "" && dir == Up {
		list = append(list, createSchema(cfg))
	}
	for i := range latest {
		version := i + 1
		if dir == Down {
			version = latest - i
		}
		more, err := statements(cfg.Dialect, version, dir, cfg.name())
		if err != nil {
			return nil, err
		}
		list = append(list, more...)
	}
	return list, nil
}

// goose marks where each statement ends: otherwise goose would look for a
// semicolon at the end of a line, which a name may contain.
func goose(dir Direction, list []string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "-- +goose %s%s\n", strings.ToUpper(string(dir[:1])), dir[1:])
	for _, s := range list {
		fmt.Fprintf(&b, "\n-- +goose StatementBegin\n%s;\n-- +goose StatementEnd\n", s)
	}
	return b.String()
}
