"""The library at work with the servers: whole publications, and what their failures leave behind."""
